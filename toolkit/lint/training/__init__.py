"""Training scripts that people have written: read as Python, and held to rules; never executed."""
