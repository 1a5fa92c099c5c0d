"""Rules about srun: the number of torchruns, and the effect of a failure on other tasks."""

import re
from collections import defaultdict
from collections.abc import Iterator

from toolkit.job.sbatch_options import names
from toolkit.lint.bash.ast import compounds
from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import QUIET, SrunStep
from toolkit.lint.scripts.launchers import AGENTS
from toolkit.lint.scripts.script import TOOLS, BatchScript, count

EXIT_BARRIER_S = 300
"""Timeout of the exit barrier between torchruns (torch, elastic agent)."""

_NAMES_CPUS = {"cpus-per-task", "cpus-per-gpu", "exclusive", "cores-per-socket"}
_PYTHON = re.compile(r"(\S*/)?python[0-9.]*")
_ALL_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


_WITHOUT_CPUS = ((22, 5), (23, 2))
"""Slurm versions in which srun does not inherit `--cpus-per-task` (source; 22.05 tested)."""


@SCRIPTS.rule(
    "srun-cpus",
    finds="with a site of Slurm 22.05 or 23.02: an srun that relies on `--cpus-per-task` of sbatch",
    reason="In these two versions srun does not inherit it: each task counts one CPU, and is bound "
    "to it where the site binds tasks.",
    fix="add export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK above, and give srun a number of tasks "
    "(--ntasks-per-node) if sbatch has none: without one, it starts as many as fit",
)
def _cpus(script: BatchScript) -> Iterator[Violation[int]]:
    cpus, slurm = script.value("cpus-per-task"), script.site.slurm
    if slurm not in _WITHOUT_CPUS or cpus in (None, "1") or script.exports("SRUN_CPUS_PER_TASK"):
        return
    for step in script.training:
        bind = step.options.get("cpu-bind")
        free = bind is not None and any(word in bind.text for word in ("none", "mask", "map"))
        aside = step.call.captured or "overlap" in step.options or step.unsure
        if not (free or aside or _NAMES_CPUS & step.options.keys()):
            what = f"srun of Slurm {slurm[0]}.{slurm[1]:02} does not inherit --cpus-per-task={cpus}"
            yield Violation(step.line, f"{what}; its tasks count one CPU each")
            return


@SCRIPTS.rule(
    "several-torchruns",
    finds="a step that may start several torchruns on a node",
    reason="Each of them starts --nproc-per-node workers, with local ranks from 0, so ranks share "
    "GPUs. Where srun has --cpus-per-task and no number of tasks, it starts as many tasks as the "
    "job has CPUs for; since Slurm 23.11 it has that of sbatch.",
    fix="give srun --ntasks-per-node=1; torchrun starts the workers (--nproc-per-node)",
)
def _several(script: BatchScript) -> Iterator[Violation[int]]:
    for step in script.starts:
        own = step.options.get("ntasks-per-node")
        option = own or script.options.get("ntasks-per-node")
        tasks = step.options.get("ntasks") or script.options.get("ntasks")
        if (own is None and _one_per_node(script, step)) or (own is None and step.unsure):
            continue
        if option is not None:
            if count(option.text) not in (None, 1):
                yield Violation(
                    option.line,
                    f"--ntasks-per-node={option.text} starts {option.text} torchruns on each node",
                    fix="write --ntasks-per-node=1; torchrun starts the workers (--nproc-per-node)",
                )
        elif tasks is not None and tasks.number is not None:
            nodes = (step.options.get("nodes") or script.options.get("nodes")) or None
            where = f"{nodes.text} nodes" if nodes and nodes.text not in ("", "1") else "one node"
            yield Violation(
                tasks.line, f"--ntasks={tasks.text} on {where} starts several torchruns"
            )
        elif tasks is None and (cpus := _cpus_of(script, step)):
            yield Violation(
                step.line,
                f"srun has {cpus} and no number of tasks, so it starts as many torchruns per node "
                "as the job has CPUs for",
                fix="give srun --ntasks-per-node=1",
            )


def _one_per_node(script: BatchScript, step: SrunStep) -> bool:
    """Whether a step has at most one task per node."""
    tasks, nodes = step.options.get("ntasks"), step.options.get("nodes")
    if (tasks is None or tasks.value is None) and nodes is None:
        tasks = script.options.get("ntasks")
    if tasks is None or tasks.value is None:
        return False
    if not tasks.value.known:
        same = nodes is not None and nodes.value is not None and nodes.text == tasks.text
        return same or any(piece.name in _ALL_NODES for piece in tasks.value.pieces)
    most = count(nodes.text) if nodes and nodes.value else script.nodes
    # The number of nodes in an unknown variable can be any number.
    unknown = nodes is not None and nodes.number is None and most is None
    return unknown or (tasks.number is not None and tasks.number <= (most or 1))


def _cpus_of(script: BatchScript, step: SrunStep) -> str:
    """Return the source of a step's `--cpus-per-task`; empty if the step does not get it."""
    if "cpus-per-task" in step.options:
        return "--cpus-per-task"
    if script.exports("SRUN_CPUS_PER_TASK"):
        return "SRUN_CPUS_PER_TASK"
    job, slurm = script.options.get("cpus-per-task"), script.site.slurm
    if job is None or (slurm is not None and slurm < _INHERITS_AGAIN):
        return ""
    return f"--cpus-per-task={job.text} of sbatch" + ("" if slurm else " (from Slurm 23.11 on)")


_INHERITS_AGAIN = (23, 11)
"""The first Slurm version in which srun again inherits `--cpus-per-task` (source)."""


@SCRIPTS.rule(
    "kill-on-bad-exit",
    finds="an srun that starts torchrun on several nodes, or ranks by itself, without "
    "`--kill-on-bad-exit`",
    reason="When the torchrun of a node, or a rank, fails, the others may wait for it, until a "
    "timeout or the time limit, unless the site sets KillOnBadExit (default: 0).",
    fix="give srun --kill-on-bad-exit=1",
)
def _bad_exit(script: BatchScript) -> Iterator[Violation[int]]:
    if script.exports("SLURM_KILL_BAD_EXIT"):
        return
    runs = defaultdict(list)
    for run in script.walk.torchruns:
        runs[id(run.step)].append(run)
    for step in script.starts:
        several = any(map(script.several, runs[id(step)]))
        handled = step.unsure or {"kill-on-bad-exit", "no-kill"} & step.options.keys()
        if several and not handled:
            names = {run.launcher.name for run in runs[id(step)]}
            what = f"this srun continues when a node's {min(names)} has failed, and the others wait"
            yield Violation(step.line, f"{what} for it")
    starts = {id(step) for step in script.starts}
    ranks = {id(call.step) for call in script.walk.calls if _PYTHON.fullmatch(call.name)}
    if next(script.settings("MASTER_ADDR"), None) is None:
        return  # its tasks may be independent of each other
    for step in script.training:
        handled = step.unsure or {"kill-on-bad-exit", "no-kill"} & step.options.keys()
        if id(step) in ranks - starts and not handled and script.several_tasks(step):
            what = "this srun continues when a rank has failed, and the others wait for it"
            yield Violation(step.line, what)


@SCRIPTS.rule(
    "srun-wait",
    finds="`srun --wait` below torchrun's exit barrier",
    reason=f"At the end the torchruns wait for each other for up to {EXIT_BARRIER_S} s; srun kills "
    "those that are slower than --wait.",
    fix="give --wait=0 (no limit) or more than 300; without it, the site's WaitTime applies",
)
def _wait(script: BatchScript) -> Iterator[Violation[int]]:
    steps = {id(run.step) for run in script.walk.torchruns if run.launcher.name in AGENTS}
    starts = [step for step in script.starts if id(step) in steps]
    options = [step.options["wait"] for step in starts if "wait" in step.options]
    times = [("--wait", option.line, option.number) for option in options]
    if starts:
        settings = script.settings("SLURM_WAIT")
        times += [(setting.name, setting.line, setting.value.number) for setting in settings]
    for name, line, seconds in times:
        if seconds is not None and 0 < seconds < EXIT_BARRIER_S:
            what = f"{name}={seconds} is shorter than torchrun's exit barrier of "
            yield Violation(line, f"{what}{EXIT_BARRIER_S} s")


@SCRIPTS.rule(
    "srun-overlap",
    finds="a second srun while one runs in the background, without `--overlap`",
    reason="By default a step takes all of the job's CPUs on its nodes for itself: the second one "
    "waits until the first has ended.",
    fix="give the smaller of them --overlap",
)
def _overlap(script: BatchScript) -> Iterator[Violation[int]]:
    running: list[SrunStep] = []
    steps = {step.call.order: step for step in script.walk.steps if step.program}
    for call in script.walk.calls:
        step = steps.get(call.order)
        if call.name == "wait" and call.level == "batch":
            running = []
        elif step is not None and step.call.level == "batch" and not step.call.captured:
            blocked = [other for other in running if _in_the_way(script, other, step)]
            if blocked:
                yield Violation(
                    step.line,
                    f"the srun of line {blocked[0].line} runs in the background and holds the "
                    "CPUs; this one waits until it has ended",
                    fix="give this srun --overlap",
                )
            elif step.call.background:
                running.append(step)


def _in_the_way(script: BatchScript, one: SrunStep, other: SrunStep) -> bool:
    """Whether two steps on separate nodes need more nodes than the job has."""
    apart = {"overlap", "exact", "exclusive", "nodelist", "relative", "het-group", "exclude"}
    unsure = one.unsure or other.unsure
    if unsure or apart & (one.options.keys() | other.options.keys()):
        return False
    options = [step.options.get("nodes") for step in (one, other)]
    nodes = [option.number if option else script.nodes or 1 for option in options]
    numbers = [number for number in nodes if number is not None]
    same_function = one.call.function == other.call.function
    return same_function and len(numbers) == 2 and sum(numbers) > (script.nodes or 1)


@SCRIPTS.rule(
    "srun-without-wait",
    finds="an srun in the background that nothing waits for",
    reason="When the batch script ends, Slurm kills all of its steps.",
    fix="end the script with wait $!",
)
def _no_wait(script: BatchScript) -> Iterator[Violation[int]]:
    calls = script.walk.calls
    waits = (call.order for call in calls if call.name == "wait" and not call.background)
    last = max([*waits, _last_work(script)], default=-1)
    loops = [node.line for node in compounds(script.commands) if node.kind in _LOOPS]
    for step in script.training:
        call = step.call
        if any(line > call.line for line in loops):
            continue  # a loop below may watch the step, or keep the script alive
        if call.background and call.level == "batch" and not call.function and last <= call.order:
            yield Violation(
                step.line,
                "nothing waits for this srun, and Slurm kills it at the script's end",
                fix="end the script with wait $!: it returns the exit status of srun",
            )


_LOOPS = ("for", "while", "until")
_PREPARES = (
    QUIET | TOOLS | {""} | names(". cd conda exit export kill mamba ml module set source trap wait")
)


def _last_work(script: BatchScript) -> int:
    """Return the order of the last foreground program, which background steps may serve."""
    training = {id(step) for step in script.training}
    aside = {step.call.order for step in script.walk.steps if id(step) not in training}
    return max(
        (
            call.order
            for call in script.walk.calls
            if call.level == "batch" and not call.background and not call.captured
            if call.name not in _PREPARES and call.order not in aside
        ),
        default=-1,
    )


@SCRIPTS.rule(
    "torchrun-without-srun",
    finds="torchrun on several nodes without srun",
    reason="A batch script runs on the first node only: its torchrun waits for others that nobody "
    "starts, or trains on that node alone.",
    fix="start it with srun --ntasks-per-node=1 --kill-on-bad-exit=1",
)
def _no_srun(script: BatchScript) -> Iterator[Violation[int]]:
    for run in script.walk.torchruns:
        # deepspeed itself starts the ranks on the nodes of its hostfile, by ssh.
        hosts = run.unsure or {"hostfile", "launcher"} & run.options.keys()
        itself = run.launcher.name == "deepspeed" and hosts
        if script.stranded(run) and not run.call.function and not itself:
            program = run.launcher.name
            what = f"the job has several nodes, and this {program} starts on the first one only"
            yield Violation(run.line, what)


@SCRIPTS.rule(
    "nodes-unused",
    finds="a program that the batch script itself starts, in a job of several nodes without srun",
    reason="A batch script runs on the first node only: the other nodes are charged, but idle.",
    fix="start it with srun --ntasks-per-node=N, or ask for one node",
)
def _unused(script: BatchScript) -> Iterator[Violation[int]]:
    others = script.walk.steps or script.walk.torchruns or not script.python
    if others or not script.several_nodes:
        return
    known = _PREPARES | {"python", "bc", "awk", "sed", "head", "tail", "cut", "sort", "tr", "tee"}
    for call in script.walk.calls:
        plain = re.sub(r"[0-9.]+$", "", call.name)
        if call.remote or not (plain in known or call.function or plain in script.walk.functions):
            return  # another program may start processes on the other nodes
    for call in script.python:
        text = " ".join(call.words)
        if re.search(r"slurm|submit|ray|dask|launch|hostfile|nodes|prepare|download", text.lower()):
            return
    what = "the job has several nodes, and this program runs on the first one only"
    yield Violation(script.python[-1].line, what)


@SCRIPTS.rule(
    "wait-for-seconds",
    finds="`wait` with a small number, as if it were sleep",
    reason="It waits for the process of that id, and returns at once: there is none.",
    fix="write sleep N, or wait for a process: wait $!",
)
def _seconds(script: BatchScript) -> Iterator[Violation[int]]:
    for call in script.walk.calls:
        known = len(call.words) == 2 and call.arguments[1].known
        if known and call.name == "wait" and re.fullmatch(r"[0-9]{1,4}[smh]?", call.words[1]):
            what = f"wait {call.words[1]} waits for a process of this id, and for no time"
            yield Violation(call.line, what)


@SCRIPTS.rule(
    "slurm-in-container",
    finds="a command of Slurm inside a container",
    reason="Most images have neither Slurm's commands nor munge's key.",
    fix="run it in the batch script, and hand the answer in by a variable",
)
def _in_container(script: BatchScript) -> Iterator[Violation[int]]:
    slurm = {"scontrol", "squeue", "sinfo", "sacct", "scancel", "sbatch", "srun"}
    for call in script.walk.calls:
        if call.container and call.name in slurm:
            where = f"inside the container of {call.container}, which has no Slurm"
            yield Violation(call.line, f"{call.name} runs {where}")
