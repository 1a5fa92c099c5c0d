"""The command line: each command is one call of the public API that a notebook can make too."""

from toolkit.cli import checking, starting, asking, describing  # isort: skip  # the order of `--help`
from toolkit.cli.entry import main
from toolkit.cli.words import cli

__all__ = ["asking", "checking", "cli", "describing", "main", "starting"]
