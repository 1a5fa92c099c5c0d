"""Rules about srun: the number of torchruns, and the effect of one failure on the others."""

from collections.abc import Iterator

from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import SrunStep
from toolkit.lint.scripts.script import BatchScript, count

EXIT_BARRIER_S = 300
"""How long torchruns wait for each other at the end (torch, elastic agent, exit barrier)."""

_NAMES_CPUS = {"cpus-per-task", "cpus-per-gpu", "exclusive", "cores-per-socket"}
_ALL_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


@SCRIPTS.rule(
    "srun-cpus",
    finds="an srun that relies on `--cpus-per-task` of sbatch",
    reason="Since Slurm 22.05 srun does not inherit it: each task counts one CPU, and is bound to "
    "it where the site binds tasks.",
    fix="add export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK above, or give srun --cpus-per-task",
)
def _cpus(script: BatchScript) -> Iterator[Violation[int]]:
    cpus = script.value("cpus-per-task")
    if cpus in (None, "1") or script.exports("SRUN_CPUS_PER_TASK"):
        return
    for step in script.training:
        if not _NAMES_CPUS & step.options.keys():
            what = f"srun does not inherit --cpus-per-task={cpus} since Slurm 22.05; "
            yield Violation(step.line, f"{what}its tasks count one CPU each")
            return


@SCRIPTS.rule(
    "several-torchruns",
    finds="a step that may start several torchruns on a node",
    reason="Each of them starts workers for all GPUs of the node; and without --ntasks-per-node "
    "srun fills the CPUs of a node with as many tasks as fit.",
    fix="give srun --ntasks-per-node=1; torchrun itself starts a worker per GPU",
)
def _several(script: BatchScript) -> Iterator[Violation[int]]:
    for step in script.starts:
        own = step.options.get("ntasks-per-node")
        option = own or script.options.get("ntasks-per-node")
        if own is None and _one_per_node(script, step):
            continue
        if option is None:
            yield Violation(
                step.line,
                "nothing says that this srun starts one torchrun per node",
                fix="give srun --ntasks-per-node=1",
            )
        elif count(option.text) not in (None, 1):
            yield Violation(
                option.line,
                f"--ntasks-per-node={option.text} starts {option.text} torchruns on each node",
                fix="write --ntasks-per-node=1; torchrun starts the workers (--nproc-per-node)",
            )


def _one_per_node(script: BatchScript, step: SrunStep) -> bool:
    """Whether a step's own numbers of tasks and nodes are the same."""
    tasks, nodes = step.options.get("ntasks"), step.options.get("nodes")
    if (tasks is None or tasks.value is None) and nodes is None:
        tasks = script.options.get("ntasks")
    if tasks is None or tasks.value is None:
        return False
    if not tasks.value.known:
        same = nodes is not None and nodes.value is not None and nodes.text == tasks.text
        return same or any(piece.name in _ALL_NODES for piece in tasks.value.pieces)
    most = count(nodes.text) if nodes and nodes.value else script.nodes
    return tasks.number is not None and tasks.number == (most or 1)


@SCRIPTS.rule(
    "kill-on-bad-exit",
    finds="an srun that starts torchrun on several nodes without `--kill-on-bad-exit`",
    reason="When the torchrun of a node fails, the others wait for it, until the time limit.",
    fix="give srun --kill-on-bad-exit=1",
)
def _bad_exit(script: BatchScript) -> Iterator[Violation[int]]:
    if script.exports("SLURM_KILL_BAD_EXIT"):
        return
    for step in script.starts:
        several = any(script.several(run) for run in script.walk.torchruns if run.step is step)
        if several and not {"kill-on-bad-exit", "no-kill"} & step.options.keys():
            what = "this srun goes on when a node's torchrun has failed, and the others wait for it"
            yield Violation(step.line, what)


@SCRIPTS.rule(
    "srun-wait",
    finds="`srun --wait` below torchrun's exit barrier",
    reason=f"At the end the torchruns wait for each other for up to {EXIT_BARRIER_S} s; srun kills "
    "those that are slower than --wait.",
    fix="leave --wait out, or give it 0 (for ever) or more than 300",
)
def _wait(script: BatchScript) -> Iterator[Violation[int]]:
    options = [step.options["wait"] for step in script.starts if "wait" in step.options]
    times = [("--wait", option.line, option.number) for option in options]
    if script.starts:
        settings = script.settings("SLURM_WAIT")
        times += [(setting.name, setting.line, setting.value.number) for setting in settings]
    for name, line, seconds in times:
        if seconds is not None and 0 < seconds < EXIT_BARRIER_S:
            what = f"{name}={seconds} is shorter than torchrun's exit barrier of "
            yield Violation(line, f"{what}{EXIT_BARRIER_S} s")


@SCRIPTS.rule(
    "srun-overlap",
    finds="a second srun while one runs in the background, without `--overlap`",
    reason="A step has its CPUs to itself: the second one waits until the first has ended.",
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
    """Whether two steps need more nodes than the job has, each for itself."""
    apart = {"overlap", "exact", "exclusive", "nodelist", "relative", "het-group", "exclude"}
    if apart & (one.options.keys() | other.options.keys()):
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
    last = max(waits, default=-1)
    for step in script.training:
        call = step.call
        if call.background and call.level == "batch" and not call.function and last <= call.order:
            yield Violation(
                step.line,
                "nothing waits for this srun, and Slurm kills it at the script's end",
                fix="end the script with wait $!, whose exit status is srun's",
            )


@SCRIPTS.rule(
    "torchrun-without-srun",
    finds="torchrun on several nodes without srun",
    reason="A batch script runs on the first node only; its torchrun waits for others that nobody "
    "starts.",
    fix="start it with srun --ntasks-per-node=1 --kill-on-bad-exit=1",
)
def _no_srun(script: BatchScript) -> Iterator[Violation[int]]:
    for run in script.walk.torchruns:
        if script.stranded(run) and not run.call.function:
            what = "the job has several nodes, and this torchrun starts on the first one only"
            yield Violation(run.line, what)


@SCRIPTS.rule(
    "slurm-in-container",
    finds="a command of Slurm inside a container",
    reason="Images have neither Slurm's commands nor munge's key.",
    fix="run it in the batch script, and hand the answer in by a variable",
)
def _in_container(script: BatchScript) -> Iterator[Violation[int]]:
    slurm = {"scontrol", "squeue", "sinfo", "sacct", "scancel", "sbatch", "srun"}
    for call in script.walk.calls:
        if call.container and call.name in slurm:
            where = f"inside the container of {call.container}, which has no Slurm"
            yield Violation(call.line, f"{call.name} runs {where}")
