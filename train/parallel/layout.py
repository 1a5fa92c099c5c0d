"""The arrangement of ranks: sizes of the five axes of parallelism, and the slice of each rank.

The axes, outermost first, are `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. The ranks of the
innermost axes communicate most, and are neighbours, on one node if possible. Pure arithmetic,
without torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes; their product is the number of ranks."""

    pp: int = 1
    """Pipeline stages held by different ranks."""
    dp_replicate: int = 1
    """Copies of the model (or of its shards) that work on different samples."""
    dp_shard: int = 1
    """Ranks that share one copy's parameters and work on different samples."""
    cp: int = 1
    """Ranks that share one sequence."""
    tp: int = 1
    """Ranks that share each layer's matrices."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the layout."""
        return math.prod(self.sizes().values())

    @property
    def shards(self) -> int:
        """Number of slices of a global batch."""
        return self.dp_replicate * self.dp_shard

    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        by_axis = {}
        for axis, size in reversed(self.sizes().items()):
            rank, by_axis[axis] = divmod(rank, size)
        return dict(reversed(by_axis.items()))

    def shard(self, rank: int) -> int:
        """Number of a rank's slice of the global batch."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        """List the axes with several ranks, such as `pp 2 x tp 4`."""
        used = [f"{axis} {size}" for axis, size in self.sizes().items() if size > 1]
        return " x ".join(used) or "1 rank"


OWN_AXIS = {
    "ddp": "dp_replicate",
    "local-sgd": "dp_replicate",
    "fsdp": "dp_shard",
    "pp": "pp",
    "tp": "tp",
    "cp": "cp",
}
"""The axis along which a strategy arranges its ranks."""
ALONE = ("single", "dataparallel", "manual")
"""Strategies with a single process, which uses several devices by threads or in turn."""


def resolve(
    strategy: str, sizes: Mapping[str, int | None], *, world_size: int, local_world_size: int
) -> Layout:
    """Arrange `world_size` ranks by the strategy's name and the given sizes.

    The axis of the strategy takes the remaining ranks; other axes without a given size have size 1.
    `hsdp` shards within a node and replicates across nodes (within one node: 2 copies).

    Raises:
        UsageError: the product of the sizes is not the number of ranks; shows the arithmetic.
    """
    given = {axis: size for axis, size in sizes.items() if size is not None}
    flags = " ".join(f"{flag(axis)} {size}" for axis, size in given.items())
    if strategy in ALONE:
        if world_size > 1:
            raise UsageError(
                f"--strategy {strategy} uses one process, but there are {world_size}: each would "
                "train a separate model; use --strategy ddp, or start one process"
            )
        if math.prod(given.values()) > 1:
            raise UsageError(
                f"--strategy {strategy} uses one process, but {flags} asks for more: leave it out, "
                "or use --strategy hybrid"
            )
        return Layout()
    if strategy == "ps":
        if given:
            raise UsageError(f"--strategy ps has no axes: leave out {flags}")
        if world_size < 2:
            raise UsageError(
                "--strategy ps needs a server and at least one trainer, but there is 1 rank: use "
                "torchrun --nproc-per-node 2 or more, or --spawn 2 or more"
            )
        # Each trainer draws different slices; rank 0 is the server.
        return Layout(dp_replicate=world_size)
    if strategy in ("ddp", "local-sgd") and (
        others := {axis for axis, size in given.items() if size > 1} - {OWN_AXIS[strategy]}
    ):
        foreign = " ".join(f"{flag(axis)} {given[axis]}" for axis in given if axis in others)
        raise UsageError(
            f"--strategy {strategy} knows --dp-replicate only, not {foreign}; leave "
            "--strategy out to combine axes"
        )
    chosen = dict(given)
    rest, remainder = divmod(world_size, math.prod(given.values()))
    if remainder == 0 and strategy == "hsdp":
        if "dp_shard" not in given and "dp_replicate" not in given:
            several_nodes = rest > local_world_size and rest % local_world_size == 0
            chosen["dp_shard"] = local_world_size if several_nodes else max(rest // 2, 1)
        for axis in {"dp_shard", "dp_replicate"} - chosen.keys():
            chosen[axis] = world_size // math.prod(chosen.values())
    elif remainder == 0 and strategy in OWN_AXIS and OWN_AXIS[strategy] not in given:
        chosen[OWN_AXIS[strategy]] = rest
    layout = Layout(**chosen)
    if layout.world_size != world_size:
        product = " x ".join(f"{axis} {size}" for axis, size in chosen.items()) or "no axis given"
        raise UsageError(
            f"the sizes of the mesh do not fit {counted(world_size, 'rank')}: {product} = "
            f"{layout.world_size}; {_way_out(chosen, world_size)}"
        )
    return layout


def flag(axis: str) -> str:
    """Name the flag that sets an axis."""
    return "--" + axis.replace("_", "-")


def _way_out(chosen: Mapping[str, int], world_size: int) -> str:
    """Suggest a size of an axis, or a number of ranks, that fits."""
    product = math.prod(chosen.values())
    start = f"start {counted(product, 'rank')}"
    for axis in ("dp_replicate", "dp_shard"):
        others = product // chosen.get(axis, 1)
        if world_size % others == 0:
            return f"{flag(axis)} {world_size // others} would fit, or {start}"
    return f"{start}, or choose sizes with a product of {world_size}"


def counted(count: int, noun: str) -> str:
    """Write a number of things, such as `1 shard` or `2 batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural * (count != 1)}"
