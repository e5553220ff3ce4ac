"""Requests, batches and the engine loop."""
