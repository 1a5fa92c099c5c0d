"""The program `toolkit`, also as `python -m toolkit`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, and end quietly when Ctrl-C comes while it is still imported."""
    try:
        from toolkit.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
