"""The versions of the site: a folder each, a list of them, and `latest`."""

import html
import json
import re
from pathlib import Path

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torch-deploy-toolkit: versions of the documentation</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 1rem; }}
</style>
</head>
<body>
<h1>torch-deploy-toolkit</h1>
<p>Versions of the documentation, the newest first:</p>
<ul>
{items}
</ul>
</body>
</html>
"""


def write(site: Path, built: str) -> None:
    """List the versions that are in the folder, and have `latest` lead to the newest one."""
    known = [path.name for path in site.iterdir() if (path / "index.html").is_file()]
    known = sorted({*known, built} - {"latest"}, key=_order, reverse=True)
    latest = site / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(known[0])
    (site / "versions.json").write_text(json.dumps(known) + "\n", encoding="utf-8")
    items = "\n".join(
        f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a></li>'
        for name in known
    )
    (site / "index.html").write_text(_PAGE.format(items=items), encoding="utf-8")


def _order(version: str) -> list[int]:
    """Return a key by which versions are ordered, a pre-release before its release.

    >>> sorted(["0.10.0", "0.9.0", "0.10.0rc1"], key=_order)
    ['0.9.0', '0.10.0rc1', '0.10.0']
    """
    release = re.match(r"[0-9.]+", version)
    numbers = [int(part) for part in (release[0] if release else "0").strip(".").split(".")]
    return [*numbers, 0 if re.search(r"[a-z]", version) else 1]
