"""Reads bash: words, quotes, expansions, here-documents and compound commands, with their lines."""
