"""The command line: each command is one call of the public API that a notebook can make too."""

from toolkit.cli.main import main
from toolkit.cli.options import cli

__all__ = ["cli", "main"]
