"""Text that people and programs write: quantities, YAML, secrets in it, files of others. Pure."""
