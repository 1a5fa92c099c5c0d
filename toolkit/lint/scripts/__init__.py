"""The parser and the rules for hand-written batch scripts."""
