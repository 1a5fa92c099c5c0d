"""When a run is proved, what it says about the proof, and what is recorded.

A run is proved at its first start, before the first step. `--verify-only` does that and no more.
"""

import time

from .. import parallel, tasks
from ..cli.config import Config
from ..errors import EXIT_DONE, ProofError
from ..parallel.base import Parts
from ..parallel.layout import Layout
from ..rundir.console import Console
from ..rundir.files import VERSION, RunDirectory, write_atomically
from ..rundir.jsonl import dump
from ..runtime import devices
from ..runtime.devices import written
from ..runtime.process_group import open_group
from ..runtime.rank import RankInfo
from ..tasks.base import sketch_of
from .proving import PATIENCE_S, Verdict, prove
from .trial import Cut, copied

RECORD = "proof.json"
SHARE = 0.5
"""Of a rank's memory that a proof may take beside the run."""
_COPIES = 6
"""In double precision: weights, gradients, two moments, the state of one process, a change."""


def before_training(parts: Parts, directory: RunDirectory, console: Console) -> None:
    """Prove a run that makes its first step now, unless it need not or cannot be proved.

    All ranks call this.

    Raises:
        ProofError: on all ranks; the strategy would train something else than one process does, or
            there is no proof and `--verify` wants one.
    """
    config = parts.config
    if config.verify is False or not is_cut(config, parts.layout, parts.group.rank_info):
        return
    verdict = _verdict(parts)
    if verdict.problem:
        raise ProofError(_refusal(parts, verdict))
    if verdict.missing and config.verify:
        raise ProofError(f"--verify: there is no proof: {verdict.missing}")
    console.say(described(verdict))
    record = {
        "version": VERSION,
        "time": time.time(),
        "equal": verdict.holds,
        "missing": verdict.missing,
        "accepted": list(verdict.accepted),
        "seconds": round(verdict.seconds, 3),
    }
    details = {name: record[name] for name in ("equal", "missing", "accepted", "seconds")}
    directory.event("proof", step=0, **details)
    parts.group.on_rank_0(
        lambda: write_atomically(directory.path / RECORD, dump(record, indent=2) + "\n")
    )


def prove_only(config: Config, rank_info: RankInfo, console: Console) -> int:
    """Prove what a command line would train; nothing is trained or written.

    Raises:
        ProofError: on all ranks; as `before_training()`, and where there is no proof.
    """
    task = tasks.load(config.task)
    layout = config.layout_on(rank_info)
    with open_group(rank_info, config) as group:
        parts = Parts(task=task, config=config, layout=layout, group=group)
        if not is_cut(config, layout, rank_info):
            console.say("proof: one process with the whole batch trains what is written")
            return EXIT_DONE
        # Its own checks come first, as at a start.
        parallel.build(config.strategy_on(rank_info), parts).verify()
        verdict = _verdict(parts)
        if verdict.problem:
            raise ProofError(_refusal(parts, verdict))
        if verdict.missing:
            raise ProofError(f"--verify-only: there is no proof: {verdict.missing}")
        console.say(described(verdict))
    return EXIT_DONE


def is_cut(config: Config, layout: Layout, rank_info: RankInfo) -> bool:
    """Whether anything is done otherwise than by one process with the whole batch."""
    strategy = config.strategy_on(rank_info)
    alone = strategy in ("single", "dataparallel") and config.reduce != "exact"
    cut = Cut.of(config, layout, strategy)
    return not alone or cut.parts > 1 or config.activation_checkpointing


def described(verdict: Verdict) -> str:
    """Write a verdict without a problem in one line."""
    if verdict.missing:
        return f"no proof before training: {verdict.missing}"
    accepted = f", but for what is accepted ({', '.join(verdict.accepted)})"
    return (
        f"proof: {verdict.steps} steps of {verdict.samples} samples equal those of one process"
        f"{accepted if verdict.accepted else ''} ({verdict.seconds:.1f} s)"
    )


def memory_problem(weights: int, memory: int, *, ranks: int) -> str:
    """Return why a proof takes too much memory; '' where it does not.

    Args:
        weights: Parameters of the model.
        memory: Bytes that a rank may use, for the run as well.
        ranks: How many share the memory of rank 0, which also holds the side of one process.
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
    weights = 0
    if group.rank_info.rank == 0:
        weights = sum(parameter.numel() for parameter in sketch_of(copied(parts.task)).parameters())
    weights = group.broadcast(weights)
    on_gpu = group.device.type == "cuda"
    ranks = 1 if on_gpu else group.rank_info.local_world_size
    memory = min(group.gather(devices.memory_of_a_rank(group)))
    if problem := memory_problem(weights, memory, ranks=ranks):
        return Verdict(missing=problem)
    patience = float("inf") if config.verify or config.verify_only else PATIENCE_S
    return prove(parts, patience_s=patience)


def _refusal(parts: Parts, verdict: Verdict) -> str:
    rank_info = parts.group.rank_info
    how = f"--strategy {parts.config.strategy_on(rank_info)} ({parts.layout})"
    return (
        f"{how} would not train task {parts.task.name!r} as one process does: {verdict.problem}; "
        "--no-verify trains without this proof"
    )
