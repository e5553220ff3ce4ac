"""Attention arithmetic, one operation a file; the reference module holds the plain torch twins."""
