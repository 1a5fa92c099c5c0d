"""This process among the ranks, from the environment variables of torchrun and the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import UsageError

MEETING = "TRAIN_MEETING"
"""Environment variable that `--spawn` sets for its processes."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process among the ranks of a run, with the attempt and restart number."""

    rank: int = 0
    """`RANK`: number of this process among all processes."""
    world_size: int = 1
    """`WORLD_SIZE`: how many processes there are."""
    local_rank: int = 0
    """`LOCAL_RANK`: number of this process on its node; also the number of its GPU."""
    local_world_size: int = 1
    """`LOCAL_WORLD_SIZE`: how many processes this node has."""
    attempt: int = 0
    """`TRAIN_ATTEMPT`: the number of this attempt, from 0; on Kubernetes, of the submission."""
    restart: int = 0
    """`TORCHELASTIC_RESTART_COUNT`: how often torchrun has restarted the workers; once the ranks
    are connected, the highest of them (`RankGroup.agree_on_restart`)."""
    launch: str | None = None
    """`TORCHELASTIC_RUN_ID`: torchrun's rendezvous ID; None if it has none."""
    launched: bool = False
    """Whether a launcher has numbered this process: `RANK` is set."""
    addressed: bool = False
    """Whether `MASTER_ADDR` and `MASTER_PORT` are set, for `env://`."""
    meeting: str | None = None
    """`TRAIN_MEETING`: rendezvous of the ranks that `--spawn` starts."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "RankInfo":
        """Read environment variables; without a launcher, be the only process.

        Raises:
            UsageError: a variable is not a whole number, or variables contradict each other.
        """

        def number(name: str, default: int) -> int:
            text = environ.get(name) or str(default)
            if not text.isdecimal():
                raise UsageError(f"environment variable {name}={text!r} is not a whole number")
            return int(text)

        launch = environ.get("TORCHELASTIC_RUN_ID")
        rank_info = cls(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            attempt=number("TRAIN_ATTEMPT", 0),
            restart=number("TORCHELASTIC_RESTART_COUNT", 0),
            # torchrun's value if it was given no ID.
            launch=None if launch == "none" else launch,
            launched="RANK" in environ,
            addressed=bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")),
            meeting=environ.get(MEETING),
        )
        if rank_info.world_size > 1 and not rank_info.launched:
            raise UsageError(
                f"environment variable WORLD_SIZE={rank_info.world_size} without RANK: each "
                "process would take itself for rank 0; set both, or neither"
            )
        for name, own, size, count in (
            ("RANK", rank_info.rank, "WORLD_SIZE", rank_info.world_size),
            ("LOCAL_RANK", rank_info.local_rank, "LOCAL_WORLD_SIZE", rank_info.local_world_size),
        ):
            # Without the local variables, as in a manual start, each node has one rank.
            if own >= count and size in environ:
                raise UsageError(
                    f"environment variable {name}={own} must be below {size}={count}: ranks are "
                    "counted from 0"
                )
        return rank_info

    def of_spawned(self, rank: int, count: int, meeting: str) -> "RankInfo":
        """Return the description of a rank that this process starts on its machine."""
        return replace(
            self,
            rank=rank,
            world_size=count,
            local_rank=rank,
            local_world_size=count,
            launched=True,
            meeting=meeting,
        )
