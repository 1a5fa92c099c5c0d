"""A bash parser: words, quotes, expansions, here-documents and compound commands, with lines.

Parsers from PyPI fail on the scripts that the toolkit itself renders: tree-sitter-bash 0.25 yields
ERROR nodes in all of `slurm/examples`, and bashlex 0.18 raises NotImplementedError at `case`.
"""
