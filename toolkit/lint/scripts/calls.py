"""What a script does: commands as they are called, steps and torchruns among them."""

from dataclasses import dataclass, field
from typing import Literal

from toolkit.lint.bash.ast import Command, Function
from toolkit.lint.scripts.options import Option
from toolkit.lint.scripts.values import Argument

__all__ = ["Call", "Level", "Setting", "Step", "Torchrun", "Trap", "Walk"]

Level = Literal["batch", "task", "handler"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """An srun."""

    options: dict[str, Option]
    program: tuple[Argument, ...]
    call: "Call"

    @property
    def line(self) -> int:
        """Where it stands."""
        return self.call.line


@dataclass(frozen=True, kw_only=True, eq=False)
class Torchrun:
    """A torchrun, or `python -m torch.distributed.run`."""

    options: dict[str, Option]
    line: int
    step: Step | None
    remote: str
    """The program that starts it on other nodes, where that is not srun."""

    call: "Call"


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A `trap`."""

    signals: tuple[str, ...]
    handler: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable that is set."""

    name: str
    value: Argument
    line: int
    exported: bool
    prefix: bool
    """Whether it is set for one command only."""

    call: "Call"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A command as it is called."""

    arguments: tuple[Argument, ...]
    line: int
    node: Command
    level: Level
    """`task` where it runs on every node; `handler` in what a trap calls."""

    function: str
    """The function in which it stands."""

    container: str
    """What runs the container around it; empty without one."""

    captured: bool
    """Whether its output becomes part of a word that is not only printed."""

    background: bool
    looped: bool
    piped_to: Command | None
    """The command that reads its output."""

    on_nodes: bool
    """Whether a shell on each node expands its words."""

    errexit: bool
    pipefail: bool
    order: int
    parent: "Call | None" = None
    """The call that starts it: srun, or `bash -c`."""

    @property
    def name(self) -> str:
        """The program's name without its folder."""
        return self.arguments[0].text.rpartition("/")[2] if self.arguments else ""


@dataclass
class Walk:
    """The collected steps and settings, in the order of the script."""

    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    torchruns: list[Torchrun] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
