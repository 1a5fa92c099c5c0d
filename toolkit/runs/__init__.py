"""Runs wherever they are: handle, status, record, run directory, logs and failure."""
