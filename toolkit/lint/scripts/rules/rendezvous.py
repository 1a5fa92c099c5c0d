"""Rules about the rendezvous of torchruns and the number of nodes and ranks."""

import re
from collections.abc import Iterator

from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import Torchrun
from toolkit.lint.scripts.launchers import WITH_RDZV_ID
from toolkit.lint.scripts.options import Option
from toolkit.lint.scripts.script import BatchScript
from toolkit.lint.scripts.values import Argument
from toolkit.text.quantities import whole_number

_LOCALHOST = re.compile(r"\[?(localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0)\]?(?=:|$)")
_DEFAULT_PORTS = {"c10d": 29400, "static": 29500}
_MASTER = re.compile(r"HEAD|MASTER|RDZV|RENDEZVOUS", re.IGNORECASE)
_DIFFER = ("HOSTNAME", "RANDOM", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID")
_RANKS = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID")
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")


def _option(script: BatchScript, run: Torchrun, *names: str) -> Option | None:
    """Return the first of these options from torchrun's command line or a `PET_…` variable."""
    for name in names:
        if name in run.options:
            return run.options[name]
        for setting in script.settings(f"PET_{name.upper().replace('-', '_')}"):
            return Option(name=name, value=setting.value, line=setting.line)
    return None


def _backend(script: BatchScript, run: Torchrun) -> str:
    backend = _option(script, run, "rdzv-backend")
    return (backend.text if backend else "") or "static"


@SCRIPTS.rule(
    "fixed-port",
    finds="in a job that may share its nodes: a rendezvous port that is the same for every job",
    reason="Two jobs on one node, or leftover processes of one, use the same port: the second job "
    "fails, or joins the first.",
    fix="compute it from the job id: port=$((61000 + SLURM_JOB_ID % 4000))",
)
def _port(script: BatchScript) -> Iterator[Violation[int]]:
    if script.whole_nodes:
        return
    values = [setting.value for setting in script.settings(*_PORTS)]
    lines: dict[int, tuple[str, str | None]] = {}
    for run in script.walk.torchruns:
        if "standalone" in run.options:
            continue
        default, program = _DEFAULT_PORTS.get(_backend(script, run), 29400), run.launcher.name
        shown = f"{default} ({program}'s default, as no port is given)"
        if (option := _option(script, run, "master-port")) is not None:
            values += [option.value] if option.value else []
            continue
        endpoint = _option(script, run, "rdzv-endpoint")
        if endpoint is None and _option(script, run, "master-addr") is None:
            if program in _MEET_ALONE and not values and _shares_its_node(script, run):
                fix = "write --standalone" if program == "torchrun" else None
                lines.setdefault(run.line, (shown, fix and f"{fix}, which takes a free one"))
            continue
        port = _port_of(endpoint.value) if endpoint and endpoint.value else ""
        if isinstance(port, Argument):
            values.append(port)
        elif port is not None and script.several(run) and not run.unsure:
            where = endpoint.line if endpoint is not None else run.line
            lines.setdefault(where, (shown, None))
    for value in values:
        if value.number is not None:
            lines.setdefault(value.line_at(0), (value.text, None))
    ports: set[str] = set()
    for line, (port, fix) in sorted(lines.items()):
        if port not in ports:  # report a port once, even if it is both assigned and written again
            yield Violation(line, f"the port {port} is the same for every job on the node", fix=fix)
        ports.add(port)


_MEET_ALONE = ("torchrun", "accelerate launch", "deepspeed")
"""Launchers with a fixed default port, even on a single node."""

_PART_OF_NODE = 4  # GPUs; nodes with fewer are rare


def _shares_its_node(script: BatchScript, run: Torchrun) -> bool:
    """Whether a torchrun on one node uses only a part of it, as far as the script shows."""
    _, gpus = _gpus_per_node(script)
    few = gpus is not None and 0 < gpus < _PART_OF_NODE
    return few and not script.several(run) and not run.unsure and not run.remote


@SCRIPTS.rule(
    "port-random",
    finds="a port that is $RANDOM alone",
    reason="RANDOM is a number from 0 to 32767: below 1024 only root may listen, and two jobs may "
    "draw the same.",
    fix="compute it from the job id: port=$((61000 + SLURM_JOB_ID % 4000))",
)
def _random(script: BatchScript) -> Iterator[Violation[int]]:
    values = [setting.value for setting in script.settings(*_PORTS)]
    for run in script.walk.torchruns:
        option = _option(script, run, "master-port")
        values += [option.value] if option and option.value else []
    for line in sorted({v.line_at(0) for v in values if [p.name for p in v.pieces] == ["RANDOM"]}):
        yield Violation(line, "a port from $RANDOM may be below 1024, where only root may listen")


def _port_of(endpoint: Argument) -> Argument | str | None:
    """Return the port of `HOST:PORT`; "" without a port, None if unknown."""
    written = "".join(p.text if p.known else "?" * len(p.text) for p in endpoint.pieces)
    if (at := written.rfind(":")) >= 0:
        return endpoint.cut(at + 1)
    names = [piece.name.upper() for piece in endpoint.pieces if not piece.known]
    may_hold_a_port = not all(names) or any("ENDPOINT" in name for name in names)
    return None if may_hold_a_port or len(endpoint.pieces) != 1 else ""


_ENDPOINT = re.compile(r"--(rdzv[-_]endpoint|master[-_]addr|main_process_ip)\b")
_TOLD_WHERE = ("torchrun", "accelerate launch", "tune run", "dlrover-run")


@SCRIPTS.rule(
    "localhost-master",
    finds="several nodes with a rendezvous at localhost",
    reason="Each node connects to itself: every node trains alone, or waits for the others.",
    fix='take the first node: hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") and '
    "head=${hosts%%$'\\n'*}; fail where it is empty",
)
def _localhost(script: BatchScript) -> Iterator[Violation[int]]:
    if not script.several_nodes or script.supervised:
        return
    lines: dict[int, str] = {}
    values: list[Argument] = []
    for run in script.walk.torchruns:
        endpoint = _option(script, run, "rdzv-endpoint", "master-addr")
        nnodes, alone = _option(script, run, "nnodes"), run.options.get("standalone")
        lonely = alone or endpoint is None or (nnodes is not None and nnodes.text == "1")
        if not script.several(run) or (lonely and script.stranded(run)):
            continue  # torchrun-without-srun reports the latter
        if alone:
            lines.setdefault(alone.line, "--standalone makes every node a separate job")
        elif endpoint is None:
            if run.unsure or run.launcher.name not in _TOLD_WHERE:
                continue
            what = f"{run.launcher.name} is given no endpoint and takes localhost"
            if word := next((w for w in run.call.words if _ENDPOINT.match(w)), None):
                name = word.partition("=")[0]
                what = f"{name} is after the script, so the script gets it: {what}"
            lines.setdefault(run.line, what)
        elif endpoint.value:
            values.append(endpoint.value)
    used = {piece.name for value in values for piece in value.pieces}
    for setting in script.walk.settings:
        if setting.value.known and (setting.name in used or _MASTER.search(setting.name)):
            values.append(setting.value)
    for value in values:
        if match := _LOCALHOST.match(value.text):
            what = f"on several nodes, {match[1]} is each node itself"
            lines.setdefault(value.line_at(0), what)
    for line, what in sorted(lines.items()):
        yield Violation(line, what)


@SCRIPTS.rule(
    "head-address",
    finds="`hostname --ip-address` or `-I` for the address of the head node",
    reason="On many systems the first gives 127.0.1.1; the second lists the addresses of all "
    "networks, in no order that one can rely on.",
    fix="use the name of the node, which Slurm's nodes resolve: head=${hosts%%$'\\n'*}",
)
def _address(script: BatchScript) -> Iterator[Violation[int]]:
    for call in script.walk.calls:
        words = call.words[1:]
        if call.name == "ssh" and "hostname" in words:
            words = words[words.index("hostname") + 1 :]
        elif call.name == "ssh":  # ssh NODE 'hostname -I'
            text = words[-1] if words else ""
            words = text.split()[1:] if text.startswith("hostname ") else []
        elif call.name != "hostname":
            continue
        if not call.captured or call.on_nodes:
            continue  # the result may differ between nodes
        for word in words:
            if word in ("-i", "-I", "--ip-address", "--all-ip-addresses"):
                what = f"hostname {word} may give a loopback address, or one of another network"
                yield Violation(call.line, what)
                break


@SCRIPTS.rule(
    "head-pipe",
    finds="`scontrol … | head` under pipefail",
    reason="head closes the pipe after one line; scontrol may die by SIGPIPE then, more likely the "
    "more nodes there are, and with `set -e` the script ends.",
    fix="write hosts=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\") and head=${hosts%%$'\\n'*}",
)
def _pipe(script: BatchScript) -> Iterator[Violation[int]]:
    for call in script.walk.calls:
        shows = call.name == "scontrol" and call.words[1:2] == ["show"]
        if not (shows and call.pipefail and call.piped_to is not None):
            continue
        name, words = call.piped_to.name, [word.shown for word in call.piped_to.words]
        if name == "head" or (name == "sed" and any("q" in word for word in words[1:])):
            what = f"under pipefail, scontrol fails once {name} has read enough"
            yield Violation(call.line, what)


@SCRIPTS.rule(
    "rdzv-id",
    finds="c10d without a rendezvous id, with the same id for every job, or with another id on "
    "each node",
    reason="Processes with the same id and endpoint belong to the same run: leftover processes of "
    "an attempt can join the next one. Nodes with different ids do not meet.",
    fix='give torchrun --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
)
def _id(script: BatchScript) -> Iterator[Violation[int]]:
    for run in [] if script.supervised else script.walk.torchruns:
        if _backend(script, run) != "c10d" or "standalone" in run.options:
            continue
        if run.launcher.name not in WITH_RDZV_ID:
            continue
        rdzv_id = _option(script, run, "rdzv-id")
        if rdzv_id is None or rdzv_id.value is None:
            if script.several(run) and not run.unsure:
                yield Violation(run.line, "c10d without --rdzv-id: every job has the same")
        elif rdzv_id.value.known:
            what = f"the rendezvous id {rdzv_id.text!r} is the same for every job"
            if "$" in rdzv_id.text:
                what = f"single quotes prevent the expansion of {rdzv_id.text}: {what}"
            yield Violation(rdzv_id.value_line, what)
        elif run.call.on_nodes:
            for piece in rdzv_id.value.pieces:
                if not piece.outer and piece.name in _DIFFER:
                    what = f"the rendezvous id holds ${piece.name}, which differs on every node"
                    yield Violation(piece.line, what)


@SCRIPTS.rule(
    "node-rank",
    finds="a static rendezvous without a node rank for each node",
    reason="Without --node-rank every node is node 0. Outside single quotes, the batch script "
    "expands $SLURM_NODEID, to 0 for all nodes.",
    fix="let every task expand it: srun bash -c 'torchrun --node-rank=$SLURM_NODEID …'; or use "
    "--rdzv-backend=c10d, which needs none",
)
def _node_rank(script: BatchScript) -> Iterator[Violation[int]]:
    for run in script.walk.torchruns:
        if not script.several(run) or run.step is None or "standalone" in run.options:
            continue
        shell, *words = run.call.arguments
        if shell.text in ("bash", "sh") and words and not words[0].text.startswith("-"):
            continue  # an unread script starts torchrun, as ours does, and may set the node rank
        if _backend(script, run) != "static":
            continue
        rank = _option(script, run, "node-rank")
        flag = run.launcher.flag("node-rank")
        if rank is None or rank.value is None:
            told = _option(script, run, "rdzv-endpoint", "master-addr") is not None
            if told and not run.unsure and run.launcher.name in _TOLD_WHERE:
                yield Violation(run.line, f"every node is node 0: {flag} is missing")
        elif rank.number is not None:
            what = f"{flag}={rank.text} is the same on every node"
            yield Violation(rank.value_line, what)
        else:
            for piece in rank.value.pieces:
                if piece.name in _RANKS and (piece.outer or not run.call.on_nodes):
                    what = f"${piece.name} is expanded by the batch script, where it is 0: "
                    yield Violation(piece.line, f"{what}every node is node 0")


@SCRIPTS.rule(
    "rank-in-batch-script",
    finds="RANK, LOCAL_RANK or NODE_RANK exported from $SLURM_PROCID … in the batch script",
    reason="The batch script is a single process with rank 0: every task of srun inherits rank 0.",
    fix="let every task set it: srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "
    "python …'",
)
def _ranks(script: BatchScript) -> Iterator[Violation[int]]:
    if not (script.directives and any(map(script.several_tasks, script.training))):
        return
    names = ["RANK", "LOCAL_RANK", *([] if script.walk.torchruns else ["NODE_RANK"])]
    for setting in script.settings(*names):
        call = setting.call
        own = call.level == "batch" and not (call.function or call.on_nodes or setting.prefix)
        exported = setting.exported or setting.name in script.walk.exported
        for piece in setting.value.pieces:
            if own and exported and not piece.known and piece.name in _RANKS:
                what = (
                    f"${piece.name} is 0 in the batch script, so {setting.name} is 0 in all tasks"
                )
                yield Violation(setting.line, what)
                break


@SCRIPTS.rule(
    "world-size-mismatch",
    finds="a WORLD_SIZE that differs from the job's number of tasks",
    reason="If it is larger, the ranks wait for others that never arrive; if it is smaller, some "
    "ranks fail.",
    fix="write export WORLD_SIZE=$SLURM_NTASKS",
)
def _world_size(script: BatchScript) -> Iterator[Violation[int]]:
    if script.walk.torchruns or len(script.training) != 1 or not script.directives:
        return
    (step,) = script.training
    each = step.options.get("ntasks-per-node") or script.options.get("ntasks-per-node")
    tasks = step.options.get("ntasks") or script.options.get("ntasks")
    number = tasks.number if tasks else None
    if tasks is None and each is not None and each.number and script.nodes:
        own = step.options.get("nodes")
        nodes = own.number if own else script.nodes
        number = (
            nodes * each.number if nodes and script.value("nodes") == str(script.nodes) else None
        )
    for setting in script.settings("WORLD_SIZE"):
        size = setting.value.number
        if number is not None and size is not None and size != number:
            what = f"WORLD_SIZE={size}, and the job has {number} tasks"
            yield Violation(setting.value.line_at(0), what)


@SCRIPTS.rule(
    "nodes-in-one-element",
    finds='a list of nodes in quotes, put into an array: nodes=("$list")',
    reason="Quotes keep it one element, with line breaks between the names: the first element is "
    "all nodes, and no address.",
    fix="leave the quotes out, or read it: mapfile -t nodes < <(scontrol show hostnames "
    '"$SLURM_JOB_NODELIST")',
)
def _one_element(script: BatchScript) -> Iterator[Violation[int]]:
    lists = {
        (id(setting.call.node), setting.name)
        for setting in script.walk.settings
        if "hostnames" in setting.value.text
    }
    nodes = {id(setting.call.node): setting.call.node for setting in script.walk.settings}
    for node in nodes.values() if lists else ():
        for assignment in node.assignments:
            if len(assignment.items or ()) != 1 or (id(node), assignment.name) not in lists:
                continue
            (item,) = assignment.items or ()
            parts = [part for part in item.parts if part.kind != "text" or part.text]
            one = len(parts) == 1 and parts[0].quoted and parts[0].kind != "text"
            if one and not parts[0].text.endswith("[@]"):
                what = f"the quotes make {assignment.name} an array of one element, which holds all"
                yield Violation(assignment.line, f"{what} nodes")


@SCRIPTS.rule(
    "nnodes-mismatch",
    finds="torchrun's number of nodes differs from the job's",
    reason="If it is larger, torchrun waits for nodes that never arrive; if it is smaller, some "
    "nodes do not train with the others.",
    fix='write --nnodes="$SLURM_JOB_NUM_NODES"',
)
def _nnodes(script: BatchScript) -> Iterator[Violation[int]]:
    for run in script.walk.torchruns:
        nnodes = _option(script, run, "nnodes")
        if nnodes is None or "standalone" in run.options or script.stranded(run):
            continue
        own = run.step.options.get("nodes") if run.step else None
        request = own or script.options.get("nodes")
        written = (request.text if request else "") or "1"
        job, torchrun = _range(written), _range(nnodes.text)
        if job and torchrun and (torchrun[0] > job[1] or torchrun[1] < job[0]):
            where = "srun" if own else "#SBATCH"
            what = f"{run.launcher.flag('nnodes')}={nnodes.text}, and {where} asks for {written}"
            yield Violation(nnodes.value_line, what)


def _range(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"([0-9]{1,18})(?:[:-]([0-9]{1,18}))?", text)
    return (int(match[1]), int(match[2] or match[1])) if match else None


@SCRIPTS.rule(
    "nproc-mismatch",
    finds="torchrun's number of workers per node differs from the node's number of GPUs",
    reason="If it is larger, a worker finds no GPU of its number, or two share a GPU, which NCCL "
    "refuses; if it is smaller, GPUs are idle.",
    fix="write --nproc-per-node=gpu, or the same number twice",
)
def _nproc(script: BatchScript) -> Iterator[Violation[int]]:
    option, gpus = _gpus_per_node(script)
    if gpus is None or script.rendered:
        return
    for run in script.walk.torchruns:
        workers = _option(script, run, "nproc-per-node")
        if run.launcher.name not in WITH_RDZV_ID:
            continue
        if workers is None and gpus > 1 and not run.unsure:
            what = f"torchrun starts one worker per node, and {option} asks for {gpus} GPUs"
            yield Violation(run.line, what)
        elif workers and workers.number is not None and workers.number != gpus:
            what = f"--nproc-per-node={workers.number}, and {option} asks for {gpus} GPUs per node"
            yield Violation(workers.value_line, what)


@SCRIPTS.rule(
    "ntasks-exceed-gpus",
    finds="more tasks per node than GPUs, with one rank per task",
    reason="A rank finds no GPU of its number, or two share a GPU, which NCCL refuses.",
    fix="make --ntasks-per-node the number of the node's GPUs",
)
def _tasks(script: BatchScript) -> Iterator[Violation[int]]:
    request, gpus = _gpus_per_node(script)
    if not gpus or script.rendered or next(script.settings("MASTER_ADDR"), None) is None:
        return
    starts = {id(step) for step in script.starts}
    for step in script.training:
        each = step.options.get("ntasks-per-node") or script.options.get("ntasks-per-node")
        number = each.number if each else None
        # Two tasks per GPU may be intended; NCCL allows one rank per GPU.
        if each and number and number > gpus and id(step) not in starts:
            what = f"--ntasks-per-node={number}, and {request} asks for {gpus} GPUs per node"
            yield Violation(each.line, what)
            return


def _gpus_per_node(script: BatchScript) -> tuple[str, int | None]:
    """Return the option that requests GPUs, and the number of GPUs per node."""

    def last_number(text: str) -> int | None:
        return whole_number(re.sub(r"\(.*\)", "", text).rpartition(":")[2])

    if (text := script.value("gpus-per-node")) is not None:
        return "--gpus-per-node", last_number(text)
    for word in (script.value("gres") or "").split(","):
        if re.match(r"(gres[/:])?gpu(:|$)", word):
            return "--gres", last_number(word) if ":" in word else 1
    if (text := script.value("gpus")) is not None and script.nodes:
        number = last_number(text)
        return "--gpus", number // script.nodes if number and not number % script.nodes else None
    text = script.value("gpus-per-task")
    if text is not None and script.value("ntasks-per-node") == "1":
        return "--gpus-per-task", last_number(text)
    return "", None
