"""The rules for batch scripts, by topic."""
