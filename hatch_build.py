"""What the wheel holds beside `toolkit`, and where its page on an index leads to.

An editable installation needs none of it.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MODULES = ("*.py", "*.typed")
FOLDERS = {
    "templates": ("toolkit/templates", ("*",)),
    "jobs": ("toolkit/data/jobs", ("*.yaml",)),
    "k8s/base": ("toolkit/data/k8s/base", ("*.yaml",)),
    # Under a name of its own: many a project has a `train` already. See docs/how-to/install.md.
    "train": ("toolkit_train", MODULES),
    "distribution/train": ("toolkit_train/alias/train", MODULES),
}
"""The folders of the checkout, their places in the wheel, and which of their files."""


class WheelFiles(BuildHookInterface[Any]):
    """Adds the folders to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files, in an order that does not depend on the file system."""
        if version == "editable":
            return
        root, included = Path(self.root), build_data["force_include"]
        for folder, (place, patterns) in FOLDERS.items():
            paths = {path for pattern in patterns for path in (root / folder).rglob(pattern)}
            for path in sorted(paths):
                if path.is_file() and "__pycache__" not in path.parts:
                    included[str(path)] = f"{place}/{path.relative_to(root / folder)}"
        pth = "toolkit_train.pth"
        included[str(root / "distribution" / pth)] = pth


class PageOnAnIndex(MetadataHookInterface):
    """Adds README.md, with links that also work where no other file of the project is, and URLs.

    `repository` in pyproject.toml is the address of the project's pages on GitHub or GitLab, from
    which both are made. Where it is empty, there are no URLs, and links stay as they are.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        root, repository = Path(self.root), str(self.config["repository"]).rstrip("/")
        # From its source: hatchling knows the version only after this hook.
        source = (root / "toolkit/__init__.py").read_text()
        (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
        text = (root / "README.md").read_text()
        if repository:
            text = absolute_links(text, repository, f"v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository, f"v{version}") if repository else {}


def urls(repository: str, tag: str) -> dict[str, str]:
    """Return the addresses that indexes show beside a package, by the labels that they know."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Source": repository,
    }


def absolute_links(markdown: str, repository: str, tag: str) -> str:
    """Return a page of the repository's root whose links and images lead to the tag's files."""

    def absolute(match: re.Match[str]) -> str:
        image, text, path = match.groups()
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    # `[text](path)` and `![text](path)`; an address or an anchor of the page itself stays.
    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, markdown)
