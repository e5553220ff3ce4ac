"""Frozen settings of the server and its engine."""
