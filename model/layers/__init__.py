"""The building blocks of one decoder layer."""
