"""The settings of every kind of site, and this machine."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from toolkit.job.types import (
    Checked,
    EnvName,
    FrozenModel,
    NaturalInt,
    PositiveInt,
    Size,
    Text,
    matching,
)

__all__ = ["Flag", "FolderPath", "LocalProfile", "NodeFacts", "SiteProfile", "Word"]


def _no_home_sign(value: str) -> str:
    if not value or value.startswith("~"):
        raise ValueError(f"{value!r} is not expanded; write the whole path")
    return value


Flag = Annotated[bool, Strict()]
Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
FolderPath = Annotated[Text, Checked(_no_home_sign)]


class NodeFacts(FrozenModel):
    """The size of one node, so that a job that cannot fit is refused before it is queued."""

    gpus: NaturalInt | None = None
    """GPUs of a node."""

    cpus: PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs can use, like `480GiB`."""


class SiteProfile(FrozenModel):
    """The settings of every kind of site."""

    name: Text = ""
    """The profile's name; by default the file's."""

    node: NodeFacts = Field(default_factory=NodeFacts.model_construct)
    """The size of a node."""

    env: dict[EnvName, Text] = Field(default={})
    """Environment variables of every job; the job's own take precedence."""

    network_interface: Word | None = None
    """The network interface for NCCL and gloo, like `ib0`; by default they choose."""

    templates_dir: FolderPath | None = None
    """A folder whose templates replace or extend the toolkit's; a relative path is below the
    profile's own folder. See [templates](../how-to/templates.md)."""


class LocalProfile(SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """The kind of site."""

    runs_dir: FolderPath = "runs"
    """Where run directories are created; a relative path is below the current folder."""
