"""The reference pages of the Python API: the public names, for mkdocstrings to document."""

import toolkit

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
    overview = (
        "# Python\n\n`import toolkit` is all that a notebook needs; every command of the command "
        f"line is one of these calls.\n\n{table}\n"
    )
    return {"reference/python.md": overview, **found}
