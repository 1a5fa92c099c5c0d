"""The proof of a run: its time, its messages, and its record.

A run is proved before its first step, and again at a start with other settings that affect the
proof, such as another number of ranks or another schedule. `--verify-only` only makes the proof.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import parallel, tasks
from ..cli.config import Config
from ..errors import EXIT_DONE, ProofError, StrategyError, TrainError, is_collateral
from ..failure.record import report
from ..parallel.base import Parts
from ..parallel.layout import Layout
from ..rundir import untrusted
from ..rundir.console import Console
from ..rundir.files import VERSION, RunDirectory, write_atomically
from ..rundir.jsonl import dump
from ..runtime import devices
from ..runtime.devices import written
from ..runtime.process_group import RankGroup, open_group
from ..runtime.rank import RankInfo
from ..tasks.base import Task, sketch_of
from .proving import PATIENCE_S, Verdict, prove
from .trial import Cut, copied, one_process_trains

RECORD = "proof.json"
SHARE = 0.5
"""Share of a rank's memory that a proof may take in addition to the run."""
_COPIES = 6
"""In double precision: weights, gradients, two moments, the state of one process, a change."""


WAY = (
    "accept", "activation_checkpointing", "cp_method", "cpu_offload", "devices", "gradient_sync",
    "local_steps", "loss_parallel", "meta_init", "pp_schedule", "ps_mode", "reduce", "staleness",
    "sync_batch_norm", "virtual_shards",
)  # fmt: skip
"""Settings that require a new proof, besides strategy, layout and the cut of batches."""


def before_training(
    parts: Parts, directory: RunDirectory, console: Console, *, step: int = 0
) -> None:
    """Prove a run that starts or continues at `step`, unless a proof is not needed or recorded.

    All ranks call this.

    Raises:
        ProofError: on all ranks; the strategy would train something else than one process, or a
            proof is impossible and `--verify` requires it.
    """
    config = parts.config
    if config.verify is False or not is_cut(config, parts.layout, parts.group.rank_info):
        return
    way = way_of(parts)
    if step and parts.group.broadcast(way == _proved_way(directory, required=bool(config.verify))):
        return
    verdict = _verdict(parts)
    if verdict.problem:
        raise ProofError(_refusal(parts, verdict))
    if verdict.missing and config.verify:
        raise ProofError(f"--verify: no proof is possible: {verdict.missing}")
    console.say(described(verdict))
    record = {
        "version": VERSION,
        "time": time.time(),
        "equal": verdict.holds,
        "missing": verdict.missing,
        "accepted": list(verdict.accepted),
        "seconds": round(verdict.seconds, 3),
        "way": way,
    }
    details = {name: record[name] for name in ("equal", "missing", "accepted", "seconds")}
    directory.event("proof", step=step, **details)
    parts.group.on_rank_0(
        lambda: write_atomically(directory.path / RECORD, dump(record, indent=2) + "\n")
    )


def way_of(parts: Parts) -> dict[str, object]:
    """Return the settings that identify a proof: strategy, layout, passes and non-defaults."""
    config, layout = parts.config, parts.layout
    strategy = config.strategy_on(parts.group.rank_info)
    cut = Cut.of(config, layout, strategy)
    chosen = {name: getattr(config, name) for name in WAY}
    return {
        "strategy": strategy,
        "layout": str(layout),
        "passes": [cut.shards, cut.real_micro_batches, cut.per_pass],
        **{name: value for name, value in chosen.items() if value != getattr(Config, name)},
    }


def _proved_way(directory: RunDirectory, *, required: bool) -> object:
    """Return the settings of the last recorded proof, if there is one.

    Args:
        directory: The run directory.
        required: Whether a record that no proof was possible counts as none.
    """
    with suppress(OSError, ValueError):
        record = untrusted.read_object(directory.path / RECORD)
        if not (required and record.get("missing")):
            return record.get("way")
    return None


def prove_only(config: Config, rank_info: RankInfo, console: Console) -> int:
    """Prove the training of a command line, and return the exit status; writes nothing.

    A refusal is reported before the return.
    """
    task: Task | None = None
    try:
        task = tasks.load(config.task)
        layout = config.layout_on(rank_info)
        with open_group(rank_info, config) as group:
            parts = Parts(task=task, config=config, layout=layout, group=group)
            if not is_cut(config, layout, rank_info):
                console.say("proof: one process with the whole batch trains the code as written")
                return EXIT_DONE
            # The strategy's checks come first, as at a start.
            with refusing_failures(parts):
                parallel.build(config.strategy_on(rank_info), parts).verify()
            verdict = _verdict(parts)
            if verdict.problem:
                raise ProofError(_refusal(parts, verdict))
            if verdict.missing:
                raise ProofError(f"--verify-only: no proof is possible: {verdict.missing}")
            console.say(described(verdict))
        return EXIT_DONE
    except Exception as error:
        return report(error, rank_info, task)


@contextmanager
def refusing_failures(parts: Parts) -> Iterator[None]:
    """Refuse a strategy that raises an exception for a model that one process can train.

    If one process fails as well, the model is at fault, and the error stays unchanged. Errors of
    data or checkpoints also stay unchanged, as do all errors with `--no-verify`.

    Raises:
        StrategyError: on the ranks that have failed; other ranks lose the connection to them.
    """
    try:
        yield
    except (TrainError, OSError):
        raise
    except Exception as error:
        # Imported here, as few runs need them.
        from ..failure.diagnose import in_short, place_of

        if not _may_be_of_the_strategy(error, parts) or not one_process_trains(parts):
            raise
        text = " ".join(in_short(error).split())
        raise StrategyError(
            f"{_how(parts)} fails with task {parts.task.name!r}, which one process trains: "
            f"{place_of(error)}: {text}; use another --strategy or other options, or --no-verify "
            "to see the traceback"
        ) from error


def _may_be_of_the_strategy(error: Exception, parts: Parts) -> bool:
    """Whether the strategy may be at fault, and one process can be tried."""
    from ..failure.diagnose import modules_of, part_of

    config, group, part = parts.config, parts.group, part_of(error)
    if config.verify is False or not is_cut(config, parts.layout, group.rank_info):
        return False
    if is_collateral(error) or (part.alone and part.name != "model()"):
        return False
    if any(name and name.startswith("checkpoints.") for name in modules_of(error)):
        return False
    # If the model cannot be made, the model is at fault.
    with suppress(Exception):
        memory = devices.memory_of_a_rank(group)
        return not memory_problem(_weights(parts.task), memory, ranks=_sharing(group))
    return False


def is_cut(config: Config, layout: Layout, rank_info: RankInfo) -> bool:
    """Whether training differs from one process with the whole batch in any way."""
    strategy = config.strategy_on(rank_info)
    alone = strategy in ("single", "dataparallel") and config.reduce != "exact"
    cut = Cut.of(config, layout, strategy)
    return not alone or cut.parts > 1 or config.activation_checkpointing


def described(verdict: Verdict) -> str:
    """Describe a verdict without a problem in one line."""
    if verdict.missing:
        return f"no proof before training: {verdict.missing}"
    accepted = f", except for accepted differences ({', '.join(verdict.accepted)})"
    passes = f" with {verdict.passes} passes per step" if verdict.passes > 1 else ""
    return (
        f"proof: {verdict.steps} steps of {verdict.samples} samples equal those of one process"
        f"{passes}{accepted if verdict.accepted else ''} ({verdict.seconds:.1f} s)"
    )


def memory_problem(weights: int, memory: int, *, ranks: int) -> str:
    """Return why a proof takes too much memory; '' if it does not.

    Args:
        weights: Number of the model's parameters.
        memory: Bytes that a rank may use, including those for the run.
        ranks: Number of ranks that share the memory of rank 0, which also holds one process's side.
    """
    needed = weights * 8 * _COPIES * (ranks + 1) // ranks
    if needed <= SHARE * memory:
        return ""
    return (
        f"{weights:,} parameters take {written(needed)} per rank in the proof, of "
        f"{written(memory)} that a rank has"
    )


def _verdict(parts: Parts) -> Verdict:
    config, group = parts.config, parts.group
    weights = group.broadcast(_weights(parts.task) if group.rank_info.rank == 0 else 0)
    memory = min(group.gather(devices.memory_of_a_rank(group)))
    if problem := memory_problem(weights, memory, ranks=_sharing(group)):
        return Verdict(missing=problem)
    patience = float("inf") if config.verify or config.verify_only else PATIENCE_S
    with refusing_failures(parts):
        return prove(parts, patience_s=patience)


def _weights(task: Task) -> int:
    return sum(parameter.numel() for parameter in sketch_of(copied(task)).parameters())


def _sharing(group: RankGroup) -> int:
    """Count the ranks that share one memory."""
    return 1 if group.device.type == "cuda" else group.rank_info.local_world_size


def _how(parts: Parts) -> str:
    return f"--strategy {parts.config.strategy_on(parts.group.rank_info)} ({parts.layout})"


def _refusal(parts: Parts, verdict: Verdict) -> str:
    return (
        f"{_how(parts)} would not train task {parts.task.name!r} as one process does: "
        f"{verdict.problem}; --no-verify trains without this proof"
    )
