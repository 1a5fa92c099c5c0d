"""The parser and the rules for hand-written training scripts, which are never executed."""
