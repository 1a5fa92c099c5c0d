"""What every kind of site has, and this machine."""

from typing import Annotated, Literal

from pydantic import Field

from toolkit.job.loader import Checked, FrozenModel, Text
from toolkit.job.types import EnvName, NaturalInt, PositiveInt, Size, matching

__all__ = ["FolderPath", "LocalProfile", "NodeFacts", "SiteProfile", "Word"]


def _no_home_sign(value: str) -> str:
    if not value or value.startswith("~"):
        raise ValueError(f"{value!r} is not expanded; write the path out")
    return value


Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
FolderPath = Annotated[Text, Checked(_no_home_sign)]


class NodeFacts(FrozenModel):
    """What one node of the site has, so that a job that cannot fit is refused before it queues."""

    gpus: NaturalInt | None = None
    """GPUs of a node."""

    cpus: PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs may use, like `480GiB`."""


class SiteProfile(FrozenModel):
    """What every kind of site has."""

    name: Text = ""
    """The profile's name; the file's name where it is left out."""

    node: NodeFacts = Field(default_factory=NodeFacts.model_construct)
    """What a node has."""

    env: dict[EnvName, Text] = Field(default={})
    """Environment variables of every job; the job's own win."""

    network_interface: Word | None = None
    """The interface for NCCL and gloo, like `ib0`; they choose one where it is left out."""

    templates_dir: FolderPath | None = None
    """A folder whose templates replace or extend the toolkit's; a relative path is below the
    profile's own folder. See [templates](../how-to/templates.md)."""


class LocalProfile(SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made; a relative path is below the current folder."""
