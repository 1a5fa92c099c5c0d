"""What to train and how: one frozen object, from which the command line is generated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from train.environment import Place

DEFAULT_EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the command line says."""

    task: str = "digits"
    """What to learn: `digits` (images) or `chars` (text)."""
    strategy: str = "auto"
    """How to use several processes: `single`, `ddp`, or `auto` (ddp when there are several)."""
    steps: int | None = None
    """Train until this many optimizer steps have been made in all."""
    epochs: int | None = None
    """Train until each sample has been seen this often (default: 10, unless --steps is given)."""
    global_batch: int = 64
    """Samples per optimizer step over all ranks together."""
    micro_batch: int | None = None
    """Samples per forward pass of a rank; smaller needs less memory (default: a rank's share)."""
    lr: float = 0.005
    """Learning rate of AdamW."""
    seed: int = 0
    """Fixes initial weights, order of the data and every random number."""
    run_dir: Path | None = None
    """Directory of checkpoints, events and outcome (default: $TRAIN_RUN_DIR)."""
    checkpoint_every: int = 100
    """Write a checkpoint each so many steps; 0: only when stopped and at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints of an attempt to keep."""
    export: Path | None = None
    """Write the final weights to this file, as plain safetensors."""
    timeout_s: int = 600
    """Seconds a rank waits for the others before it gives up; must outlast a checkpoint."""

    @property
    def directory(self) -> Path:
        """The run directory, which a parsed configuration always has."""
        assert self.run_dir is not None, "parse() refuses a command line without a run directory"
        return self.run_dir

    def identity(self) -> dict[str, object]:
        """Fields that make another run of it when they change.

        `steps` and `epochs` are not among them, so that a finished run can be extended; nor is what
        changes with the number of ranks.
        """
        return {
            "task": self.task,
            "global_batch": self.global_batch,
            "lr": self.lr,
            "seed": self.seed,
        }

    def total_steps(self, train_samples: int) -> int:
        """How many steps the run has in all.

        The last step of the last epoch takes a full batch too, so a few samples of the next epoch
        may be seen; an extended run is then the same as one that was longer from the start.
        """
        if self.steps is not None:
            return self.steps
        return math.ceil((self.epochs or DEFAULT_EPOCHS) * train_samples / self.global_batch)

    def micro_batch_on(self, world_size: int) -> int:
        """Samples per forward pass on each of `world_size` ranks."""
        return self.micro_batch or self.global_batch // world_size

    def strategy_on(self, place: Place) -> str:
        """The strategy's name with `auto` resolved."""
        if self.strategy == "auto":
            return "ddp" if place.world_size > 1 else "single"
        return self.strategy


def layout_problems(config: Config, place: Place) -> list[str]:
    """Say why the batch or the strategy does not fit the ranks, with the arithmetic."""
    problems = []
    world, batch = place.world_size, config.global_batch
    share, rest = divmod(batch, world)
    if rest:
        fits = [size for size in (batch - rest, batch - rest + world) if size > 0]
        problems.append(
            f"--global-batch {batch} does not divide over {world} ranks: "
            f"{batch} = {world} x {share} + {rest}; nearest that do: {' and '.join(map(str, fits))}"
        )
    elif config.micro_batch is not None and share % config.micro_batch:
        micro = config.micro_batch
        problems.append(
            f"--micro-batch {micro} does not divide a rank's share of {share} samples "
            f"(--global-batch {batch} / {world} ranks): "
            f"{share} = {micro} x {share // micro} + {share % micro}"
        )
    if config.strategy == "single" and world > 1:
        problems.append(
            f"--strategy single uses one process, but there are {world}: each would train a model "
            "of its own; use --strategy ddp, or --nproc-per-node 1 --nnodes 1"
        )
    if config.strategy == "ddp" and not place.launched:
        problems.append(
            "--strategy ddp needs a launcher that sets RANK and MASTER_ADDR: "
            "start it as `torchrun --nproc-per-node N -m train …`"
        )
    return problems
