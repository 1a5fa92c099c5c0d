"""The command line: each command is one call of the public API that a notebook can make too."""

# In the order of `--help`.
from toolkit.cli import init, check, submit, runs, logs, schema  # isort: skip
from toolkit.cli.main import main
from toolkit.cli.options import cli

__all__ = ["check", "cli", "init", "logs", "main", "runs", "schema", "submit"]
