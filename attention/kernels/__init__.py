"""Attention arithmetic, one operation a file;  holds the plain torch twins."""
