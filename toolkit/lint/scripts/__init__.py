"""Batch scripts that people have written: read, and held to rules."""
