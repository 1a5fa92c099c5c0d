"""Reads and writes text: quantities, YAML, manifests, secrets, untrusted files."""
