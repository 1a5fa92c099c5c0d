"""Refusing a command line that cannot work, with the arithmetic, before anything starts.

This module does not import torch. Limits of the model or the machine (heads, pieces, classes,
backends) are checked later, by the modules that know them.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError
from ..parallel.layout import ALONE, Layout, flag
from ..parallel.pipeline import split
from ..profiling.timeline import Profile
from ..runtime.rank import RankInfo
from .config import Config, nearest

COMPOSED = ("fsdp", "hsdp", "tp", "cp", "hybrid", "pp")
"""Strategies of `train.parallel.hybrid` and `.pipeline`, which shard along the data axes."""
ACCEPTED = ("batch-norm", "layer-mixes-samples", "loss-mixes-samples")
"""Differences from one process that `--accept` allows: see `train.proof.mixing`."""
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^/:\s\[\]]+):(\d{1,5})")
_FILE = re.compile(r"file://(/.*[^/])")


def problems(config: Config, rank_info: RankInfo, *, only_looking: bool = False) -> list[str]:
    """List the settings that cannot work on the ranks of this start or of `--spawn`.

    `only_looking`: nothing is trained, so the sizes of the mesh give the number of ranks.
    """
    problems = list(_starting(config, rank_info))
    if config.steps is not None and config.epochs is not None:
        problems.append("--steps and --epochs both say when to end: give one of them")
    uses = [
        name
        for name, given in (
            ("--dry-run", config.dry_run),
            ("--verify-only", config.verify_only),
            ("--evaluate-only", config.evaluate_only),
            ("--predict", config.predict is not None),
        )
        if given
    ]
    if len(uses) > 1:
        problems.append(f"{' and '.join(uses)} exclude each other: give one of them")
    problems += [
        f"--accept {name!r} is unknown{nearest(name, ACCEPTED)}; use some of "
        f"{', '.join(ACCEPTED)}, with commas between them"
        for name in sorted(config.accepted - {*ACCEPTED})
    ]
    if config.verify_only and config.verify is False:
        problems.append("--verify-only and --no-verify exclude each other: leave out one of them")
    if config.dropout is not None and config.dropout > 1:
        problems.append(f"--dropout {config.dropout} is a probability: from 0 to 1")
    if config.profile is not None:
        try:
            Profile.parse(config.profile)
        except UsageError as error:
            problems.append(str(error))
    ranks = ranks_of(config, rank_info, only_looking=only_looking)
    if only_looking and ranks.world_size == 1:
        # The number of ranks is not known.
        return problems
    try:
        layout = config.layout_on(ranks)
    except UsageError as error:
        return [*problems, str(error)]
    strategy = config.strategy_on(ranks)
    if not (only_looking or ranks.launched or strategy in ALONE):
        problems.append(
            f"--strategy {strategy} needs a launcher that says which rank this is (RANK): start it "
            "with `torchrun --nproc-per-node N -m train`, or let --spawn N start N processes here"
        )
    problems += _misplaced(config, strategy, layout)
    problems += _incompatible(config, strategy)
    # Only training must divide the training batch.
    return problems if config.infers else problems + _shares(config, strategy, layout)


def ranks_of(config: Config, rank_info: RankInfo, *, only_looking: bool = False) -> RankInfo:
    """Return a rank of a configuration's world: this one under a launcher, else rank 0."""
    if rank_info.launched:
        return rank_info
    if config.spawn is not None:
        return rank_info.of_spawned(0, config.spawn, "")
    sizes = [size for size in config.axis_sizes().values() if size is not None]
    if only_looking and sizes:
        return rank_info.of_spawned(0, math.prod(sizes), "")
    return rank_info


def backend_problem(config: Config, backend: str) -> str | None:
    """Return the setting that a backend does not support."""
    if config.comm_hook == "bf16" and backend == "gloo":
        return (
            "--comm-hook bf16 needs --backend nccl, as gloo cannot add bf16 numbers; use "
            "--comm-hook fp16"
        )
    return None


def exact_problems(config: Config, layout: Layout) -> list[str]:
    """List settings that would make the bits of `--reduce exact` depend on the number of ranks."""
    ranks, virtual = layout.world_size, config.virtual_shards
    if config.strategy not in ("auto", "single", "ddp") or layout.dp_replicate != ranks:
        return [
            f"--reduce exact keeps the whole model on each rank: it fits --strategy ddp, not "
            f"--strategy {config.strategy} ({layout}); leave out one of the two"
        ]
    problems = []
    if virtual % ranks:
        fitting = [str(n) for n in range(1, virtual + 1) if virtual % n == 0]
        problems.append(
            f"--reduce exact shares --virtual-shards {virtual} evenly, but {virtual} = "
            f"{virtual // ranks} x {ranks} + {virtual % ranks}; start {', '.join(fitting)} ranks, "
            f"or begin a new run with --virtual-shards {ranks} or a multiple"
        )
    if config.global_batch < virtual:
        problems.append(
            f"--virtual-shards {virtual} cannot each have a sample of --global-batch "
            f"{config.global_batch}; use --virtual-shards {config.global_batch} or fewer"
        )
    if config.sync_batch_norm:
        problems.append(
            "--sync-batch-norm normalises over whatever ranks there are, which --reduce exact must "
            "not depend on; leave out one of the two"
        )
    if config.comm_hook != "none":
        problems.append(
            f"--comm-hook {config.comm_hook} rounds what --reduce exact keeps; leave out one of "
            "the two"
        )
    return problems


def _starting(config: Config, rank_info: RankInfo) -> Iterator[str]:
    text = config.init_method
    if config.spawn is not None and rank_info.launched and rank_info.meeting is None:
        yield (
            f"--spawn {config.spawn} starts processes by itself, but a launcher has started this "
            f"one as rank {rank_info.rank} of {rank_info.world_size}: leave out --spawn, or the "
            "launcher"
        )
    if text == "env://":
        if rank_info.launched and not (rank_info.addressed or rank_info.meeting):
            yield (
                "RANK is set, but MASTER_ADDR and MASTER_PORT are not, where --init-method env:// "
                "meets: set them, or use --init-method tcp://HOST:PORT or file:///NEW-FILE"
            )
    elif text.startswith("tcp://"):
        parts = _TCP.fullmatch(text)
        if parts is None or not 0 < int(parts[2]) < 65536:
            yield (
                f"--init-method {text!r} must be tcp://HOST:PORT: rank 0's host, and a port from 1 "
                "to 65535 that is free there"
            )
    elif text.startswith("file://"):
        parts = _FILE.fullmatch(text)
        if parts is None:
            yield f"--init-method {text!r} must be file:///PATH: a full path that all ranks see"
        elif not Path(parts[1]).parent.is_dir():
            yield f"--init-method {text}: directory {Path(parts[1]).parent} does not exist"
    else:
        yield (
            f"--init-method {text!r} is unknown: use env://, tcp://HOST:PORT or file:///NEW-FILE"
        )


def _misplaced(config: Config, strategy: str, layout: Layout) -> Iterator[str]:
    """Name flags that would be ignored silently, and the flags to which they belong."""
    # `auto` takes ddp only for several ranks: a run that shrinks to one must not be refused.
    ddp = strategy == "ddp" or (strategy == "single" and config.strategy == "auto")
    data_axes = layout.dp_replicate * layout.dp_shard * layout.cp
    shards = strategy in COMPOSED and (strategy in ("fsdp", "hsdp", "cp") or data_axes > 1)
    # Copies alone do not shard parameters.
    parts = shards and (strategy in ("fsdp", "hsdp") or layout.dp_shard * layout.cp > 1)
    owners = {
        "momentum": (config.optimizer == "sgd", "--optimizer sgd"),
        "pp_schedule": (layout.pp > 1, "--pp"),
        "cp_method": (layout.cp > 1, "--cp"),
        "loss_parallel": (layout.tp > 1, "--tp"),
        "comm_hook": (ddp, "--strategy ddp"),
        "gradient_sync": (parts, "--strategy fsdp or --dp-shard"),
        "cpu_offload": (shards, "--strategy fsdp or --dp-shard"),
        "meta_init": (strategy in COMPOSED, "--strategy fsdp or --dp-shard"),
        "devices": (strategy in ("manual", "dataparallel"), "--strategy manual or dataparallel"),
        "ps_mode": (strategy == "ps", "--strategy ps"),
        "staleness": (config.ps_mode == "bounded", "--ps-mode bounded"),
        "local_steps": (strategy == "local-sgd", "--strategy local-sgd"),
        "local_start": (strategy == "local-sgd", "--strategy local-sgd"),
        "virtual_shards": (config.reduce == "exact", "--reduce exact"),
        "device_memory": (config.dry_run, "--dry-run"),
        "nproc_per_node": (config.dry_run, "--dry-run"),
        "json": (config.dry_run or config.evaluate_only, "--dry-run or --evaluate-only"),
        "checkpoint": (config.infers, "--evaluate-only or --predict"),
    }
    for name, (fits, owner) in owners.items():
        value, unset = getattr(config, name), getattr(Config(), name)
        if value != unset and not fits:
            setting = flag(name) if value is True else f"{flag(name)} {value}"
            yield f"{setting} belongs to {owner}, and would be ignored here: leave it out"


def _incompatible(config: Config, strategy: str) -> Iterator[str]:
    if (strategy == "pp" or (config.pp or 1) > 1) and config.gradient_sync == "each":
        yield (
            "--gradient-sync each cannot be combined with --pp: the schedules of pipelines reduce "
            "gradients after the last micro-batch of a stage; leave it out, or leave out --pp"
        )
    if strategy in ("manual", "dataparallel") and config.device != "auto":
        yield (
            f"--device {config.device} is one for each rank, but --strategy {strategy} has several "
            "devices: use --devices, such as `cuda:0,cuda:1` or `cpu,cpu`"
        )
    if strategy in ("local-sgd", "ps") and config.precision == "fp16":
        yield (
            f"--strategy {strategy} cannot be combined with --precision fp16: ranks that step by "
            "themselves would scale their losses differently; use --precision bf16"
        )
    if strategy == "ps":
        flags = {
            "--profile": config.profile is not None,
            "--sync-batch-norm": config.sync_batch_norm,
            "--backend mpi": config.backend == "mpi",
            "--checkpoint-every auto": config.checkpoint_every == "auto",
        }
        for name in (name for name, is_set in flags.items() if is_set):
            yield (
                f"--strategy ps cannot be combined with {name}, "
                "which needs ranks that step together"
            )
    if problem := backend_problem(config, config.backend):
        yield problem


def _shares(config: Config, strategy: str, layout: Layout) -> list[str]:
    """Check that each slice of the global batch is large enough."""
    if config.reduce == "exact":
        return exact_problems(config, layout)
    if strategy == "pp" or layout.pp > 1:
        try:
            split.check(config, layout)
        except UsageError as error:
            return [str(error)]
        return []
    shards, what = layout.shards, "data shards"
    if strategy == "ps":
        # Rank 0 serves; trainers that do not wait for each other take whole batches.
        shards, what = (layout.world_size - 1 if config.ps_mode == "sync" else 1), "trainers"
    if config.global_batch < shards:
        return [
            f"--global-batch {config.global_batch} cannot give each of {shards} {what} a sample: "
            f"use --global-batch {shards} or more, or fewer ranks"
        ]
    return []
