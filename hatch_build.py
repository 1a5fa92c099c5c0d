"""What the wheel holds beside `toolkit`, and where; an editable installation needs none of it."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

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
