"""When ranks that shard parameters reduce gradients in a step of several micro-batches.

After the last of them: once per step, but until then each rank keeps the gradients of all
parameters whole, where otherwise it has its part only. Or after each of them: as often, but nothing
whole is kept. (Copies of a shard, with `--dp-replicate`, are summed after the last one either way.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from train.parallel.base import is_sharded
from train.runtime import devices
from train.runtime.devices import parse_size, written

if TYPE_CHECKING:
    from train.parallel.base import Parts

MOST = 0.1
"""Share of a device's memory that whole gradients may take for the sake of fewer exchanges."""
_FULL_PRECISION = 4


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """The choice, and the reason for it."""

    when: Literal["last", "each"]
    """After which micro-batches of a step gradients are reduced."""
    why: str
    """In words; empty where both are the same."""

    def __str__(self) -> str:
        which = "the last" if self.when == "last" else "each"
        return f"gradients are reduced after {which} micro-batch: {self.why}" if self.why else ""


def choose(parts: Parts, model: nn.Module, micro_batches: int) -> GradientSync:
    """Choose for a model that has been sharded; all ranks call this, and choose alike."""
    config, layout = parts.config, parts.layout
    if layout.pp > 1:
        why = "the schedules of pipelines do so" if layout.dp_shard * layout.cp > 1 else ""
        return GradientSync(when="last", why=why)
    if micro_batches == 1 or layout.dp_shard * layout.cp == 1:
        return GradientSync(when="last", why="")
    if config.gradient_sync != "auto":
        return GradientSync(
            when=config.gradient_sync, why=f"--gradient-sync {config.gradient_sync}"
        )
    whole = whole_gradients(model.parameters())
    if not config.dry_run:
        # Ranks may have devices of several sizes.
        return by_memory(whole, min(parts.group.gather(devices.memory_of_a_rank(parts.group))))
    given = config.device_memory
    return by_memory(whole, None if given is None else parse_size(given))


def by_memory(whole: int, device: int | None) -> GradientSync:
    """Reduce after the last micro-batch only where whole gradients take little of the memory.

    Args:
        whole: bytes of the gradients of all parameters that a rank gathers.
        device: bytes of a rank's device; None: not known.

    >>> by_memory(7 * 2**30, 80 * 2**30).when, by_memory(9 * 2**30, 80 * 2**30).when
    ('last', 'each')
    """
    taken = f"whole, they take {written(whole)}"
    if device is None:
        limit = written(whole / MOST)
        why = f"{taken}; on devices of less than {limit}, after each: say --device-memory"
        return GradientSync(when="last", why=why)
    of_device = f"{MOST:.0%} of a device's {written(device)}"
    if whole <= MOST * device:
        return GradientSync(when="last", why=f"{taken}, no more than {of_device}")
    return GradientSync(when="each", why=f"{taken}, more than {of_device}")


def whole_gradients(parameters: Iterable[nn.Parameter]) -> int:
    """Count the bytes of gradients that are not shared out along the data axes.

    The same on each rank: of what tensor parallelism cuts, the largest part counts.
    """
    total = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        count = parameter.numel()
        if is_sharded(parameter):
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, parameter.placements, strict=True):
                if name == "tp" and not placement.is_replicate():
                    count = -(-count // parameter.device_mesh["tp"].size())
        # FSDP adds up those of micro-batches in the type that it reduces them in, see fsdp.py.
        total += count * max(parameter.element_size(), _FULL_PRECISION)
    return total
