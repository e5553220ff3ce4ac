"""Attention backends over the paged cache, dense and sparse."""
