"""Where this process stands: the part of torchrun's and the scheduler's environment we read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among the ranks of a run, and which try at the run this is."""

    rank: int = 0
    """`RANK`: number of this process among all processes."""
    world_size: int = 1
    """`WORLD_SIZE`: how many processes there are."""
    local_rank: int = 0
    """`LOCAL_RANK`: number of this process on its node; also the number of its GPU."""
    local_world_size: int = 1
    """`LOCAL_WORLD_SIZE`: how many processes this node has."""
    attempt: int = 0
    """`TRAIN_ATTEMPT`: how often the scheduler has started the job again."""
    restart: int = 0
    """`TORCHELASTIC_RESTART_COUNT`: how often torchrun has started the workers again."""
    launched: bool = False
    """Whether a launcher set `RANK` and the rendezvous, so that a process group can be made."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Place:
        """Read the place from environment variables; without torchrun, be the only process.

        Raises:
            UsageError: a variable is no whole number.
        """

        def number(name: str, default: int) -> int:
            text = environ.get(name) or str(default)
            if not text.isdecimal():
                raise UsageError(f"environment variable {name}={text!r} is no whole number")
            return int(text)

        return cls(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            attempt=number("TRAIN_ATTEMPT", 0),
            restart=number("TORCHELASTIC_RESTART_COUNT", 0),
            launched="RANK" in environ and "MASTER_ADDR" in environ,
        )
