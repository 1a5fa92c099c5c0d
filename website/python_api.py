"""The reference pages of the Python API: the public names, for mkdocstrings to document."""

import re
from pathlib import Path

import toolkit

GUIDE = Path(__file__).parents[1] / "docs/how-to/python.md"
CALLS = {
    "Submit a job and wait for its end": "toolkit.load(",
    "Look at the script or the manifest first": "toolkit.render(",
    "Read results and logs": "run.metrics(",
    "Find a run again": "toolkit.open_run(",
}
"""What most people need, each with a call in the example of the guide that shows it."""

PAGES = {
    "jobs": ("Projects, jobs, plans, rendering", ("project", "job", "planning", "rendering")),
    "profiles": ("Profiles", ("profile",)),
    "runs": ("Runs", ("api", "runs")),
    "functions": ("Functions on ranks", ("functions",)),
    "checks": ("Checks", ("checks",)),
    "errors": ("Errors", ("errors",)),
}
"""The pages: name, title, and the rooms of the package that define what is on them."""


def pages() -> dict[str, str]:
    """Return the pages by their place. Links in docstrings lead from docs/reference/."""
    names: dict[str, list[str]] = {room: [] for _, rooms in PAGES.values() for room in rooms}
    for name, home in toolkit._HOMES.items():
        names[home.partition(".")[0]].append(name)
    listed = []
    found = {}
    for page, (title, rooms) in PAGES.items():
        here = [name for room in rooms for name in names[room]]
        links = ", ".join(f"[`{name}`](python-{page}.md#toolkit.{name})" for name in here)
        listed.append(f"| [{title}](python-{page}.md) | {links} |")
        found[f"reference/python-{page}.md"] = "\n\n".join(
            [f"# Python: {title}", *(f"::: toolkit.{name}" for name in here)]
        )
    table = "\n".join(["| page | names |", "|---|---|", *listed])
    blocks = re.findall(r"(?ms)^```python$.*?^```$", GUIDE.read_text())
    examples = [
        f"## {title}\n\n{next(block for block in blocks if call in block)}"
        for title, call in CALLS.items()
    ]
    overview = [
        "# Python",
        "`import toolkit` is all that a notebook needs; most commands of the command line are one "
        "of these calls. How to use them: [From Python](../how-to/python.md).",
        *examples,
        "## All names",
        table,
    ]
    return {"reference/python.md": "\n\n".join(overview) + "\n", **found}
