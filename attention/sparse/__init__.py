"""Backends that attend to the tokens an indexer selects."""
