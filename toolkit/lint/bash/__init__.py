"""Reads bash: words, quotes, expansions, here-documents and compound commands, with their lines.

No parser from PyPI reads the scripts that the toolkit itself renders: tree-sitter-bash 0.25 yields
ERROR nodes in all of `slurm/examples`, and bashlex 0.18 raises NotImplementedError at `case`.
"""
