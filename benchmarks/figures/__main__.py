"""`python -m benchmarks.figures [--draw] [NAME or PAGE…]`: measure, draw, write the tables.

With `--draw` nothing is measured: drawings and tables are made again of what was.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.figures.figure import PAGES, figures


def main() -> None:
    """Make the figures that the command line names; all, if it names none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draw", action="store_true", help="from what was measured before")
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures, or pages with theirs")
    options = parser.parse_args()
    known = [figure for page in sorted(PAGES.glob("*.md")) for figure in figures(page.stem)]
    names = {name for figure in known for name in (figure.name, figure.page)}
    for name in options.names:
        if name not in names:
            parser.error(f"no figure is called '{name}'; there are {', '.join(sorted(names))}")
    for figure in known:
        if options.names and not {figure.name, figure.page} & set(options.names):
            continue
        print(figure.name, flush=True)
        figure.write(json.loads(figure.data_file.read_text()) if options.draw else figure.measure())


if __name__ == "__main__":
    main()
