"""The command line: each command is one call of the public API that a notebook can make too."""

# In the order of `--help`.
from toolkit.cli import beginning, checking, starting, asking, reading, describing  # isort: skip
from toolkit.cli.entry import main
from toolkit.cli.words import cli

__all__ = ["asking", "beginning", "checking", "cli", "describing", "main", "reading", "starting"]
