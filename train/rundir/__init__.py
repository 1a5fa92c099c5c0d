"""The run directory: the right to write there, and its files."""
