"""The run directory: who may write there, and the files that are written."""
