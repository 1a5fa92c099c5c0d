"""What may differ between two starts of a run, and changes more than the last digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from train.checkpoints.store import State
from train.cli.config import Config
from train.rundir.claim import differences

WORTH_TELLING = (
    "precision", "reduce", "sync_batch_norm", "comm_hook", "local_steps", "ps_mode", "staleness",
)  # fmt: skip


def changes(
    state: State, config: Config, *, frozen: Collection[str], thawed: Collection[str]
) -> list[str]:
    """List the differences between a checkpoint's configuration and this start's.

    Args:
        state: of the checkpoint.
        config: of this start.
        frozen: parameters that are not trained now.
        thawed: those that are trained now, and were not.
    """
    now = plain(config)
    there, here = (
        {name: values.get(name) for name in WORTH_TELLING} for values in (state.config, now)
    )
    newly_frozen = () if state.frozen is None else sorted(set(frozen).difference(state.frozen))
    lists = {
        "trained there, frozen here": newly_frozen,
        "frozen there, trained here": sorted(thawed),
    }
    lines = [f"{how}: {', '.join(names)}" for how, names in lists.items() if names]
    return differences(there, here) + lines


def plain(config: Config) -> dict[str, object]:
    """Give a configuration as JSON can hold it."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(config).items()
    }
