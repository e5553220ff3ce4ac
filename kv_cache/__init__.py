"""Pages of cached rows: layout, storage and bookkeeping."""
