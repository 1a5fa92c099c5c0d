"""The command line: each command is one call of the public API that a notebook can make too."""

from toolkit.cli.main import cli, main

__all__ = ["cli", "main"]
