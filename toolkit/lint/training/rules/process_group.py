"""Rules about process groups: initialization, collectives and devices."""

import ast
import re
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import Called, TrainingScript, constant

_COLLECTIVES = frozenset(
    {
        *("barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "all_gather"),
        *("all_gather_into_tensor", "all_gather_object", "gather", "gather_object", "scatter"),
        *("scatter_object_list", "broadcast_object_list", "reduce_scatter", "all_to_all"),
        *("reduce_scatter_tensor", "all_to_all_single", "new_group", "destroy_process_group"),
    }
)
_GROUP_AT = {"barrier": 0, "monitored_barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2}
"""Position of the `group` argument of a collective."""

_GROUP = re.compile(r"torch\.distributed\.\w+$")


def _collectives(script: TrainingScript) -> list[Called]:
    return [c for c in script.torch_calls(*_COLLECTIVES) if _GROUP.match(c.name)]


@TRAINING.rule(
    "rank0-barrier",
    finds="a collective that only some ranks enter",
    reason="A collective waits for all ranks of its group. The call of rank 0 under `if rank == "
    "0` meets the next collective of the others, or waits until the timeout: by default 10 minutes "
    "with the backend `nccl` (also if `device_id` chooses it), 30 with any other.",
    fix="call it on all ranks: keep only the work under the if",
)
def _on_some_ranks(script: TrainingScript) -> Iterator[Violation[int]]:
    calls = _collectives(script)
    for call in calls:
        if call.last == "destroy_process_group" or not script.rank_guards(call.node):
            continue
        group = call.argument("group", _GROUP_AT.get(call.last))
        if group is not None or call.last == "new_group":
            continue  # the group may contain only the ranks that call it
        if _is_met(script, call, calls):
            continue
        yield Violation(call.node.lineno, f"only some ranks call {call.last}() here")


def _is_met(script: TrainingScript, call: Called, calls: list[Called]) -> bool:
    """Whether the other ranks make the same call.

    They do so in the other branch, under another condition in the same function (the other ranks
    wait until rank 0 has written a file), or later, if the branch leaves the function or loop.
    """
    guards = script.rank_guards(call.node)
    function = script.function_of(call.node)
    (innermost, in_else), *_ = guards.items()
    branch = innermost.orelse if in_else else innermost.body
    leaves = isinstance(branch[-1], ast.Return | ast.Continue | ast.Break)
    for other in calls:
        if other.last != call.last or script.function_of(other.node) is not function:
            continue
        others = script.rank_guards(other.node)
        if not others:
            found = leaves and other.node.lineno > branch[-1].lineno
        elif common := guards.keys() & others.keys():
            found = any(guards[one] != others[one] for one in common)
        else:
            found = ast.dump(innermost.test) != ast.dump(next(iter(others)).test)
        if found:
            return True
    return False


@TRAINING.rule(
    "async-not-waited",
    finds="an asynchronous collective that nothing can wait for",
    reason="With async_op=True the call returns before the exchange is complete: a read of the "
    "tensor gets old numbers or new ones, and a write disturbs the exchange.",
    fix="keep the handle and wait before the tensor is used: work = …; work.wait()",
)
def _not_waited(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in _collectives(script):
        thrown_away = isinstance(next(script.parents(call.node), None), ast.Expr)
        if thrown_away and constant(call.argument("async_op")) is True:
            yield Violation(call.node.lineno, f"the handle of {call.last}(…) is not used")


@TRAINING.rule(
    "fixed-init-file",
    finds="a rendezvous file with a fixed name",
    reason="A run that is killed leaves the file behind. The next run finds the previous ranks in "
    "it, and may hang or fail.",
    fix='let torchrun tell the ranks where to meet: init_process_group("nccl") without init_method',
)
def _fixed_file(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls("init_process_group"):
        method = constant(call.argument("init_method", 1))
        if isinstance(method, str) and method.startswith("file:"):
            yield Violation(call.node.lineno, f"all runs meet at {method[:60]}")
    for call in script.torch_calls("FileStore"):
        if isinstance(name := constant(call.argument("file_name", 0)), str):
            yield Violation(call.node.lineno, f"all runs meet at {name[:60]}")


@TRAINING.rule(
    "fixed-master-port",
    finds="a fixed rendezvous port",
    reason="Two runs on one node use the same port: the second one fails, or its ranks join the "
    "first one.",
    fix="remove this line, and start the script with torchrun --standalone, which chooses a port "
    "and tells it to the ranks",
)
def _fixed_port(script: TrainingScript) -> Iterator[Violation[int]]:
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
            continue
        target = node.targets[0]
        if script.full_name(target.value) == "os.environ" and (
            constant(target.slice) == "MASTER_PORT" and constant(node.value) is not None
        ):
            if any("MASTER_PORT" in ast.dump(test.test) for test, _ in script.conditions_of(node)):
                continue  # only where it is not set, as it is by torchrun
            yield Violation(node.lineno, f"MASTER_PORT is always {constant(node.value)}")
    for call in script.torch_calls("init_process_group"):
        method = constant(call.argument("init_method", 1))
        if isinstance(method, str) and re.match(r"tcp://.*:\d+", method):
            yield Violation(call.node.lineno, f"all runs meet at {method[:60]}")


@TRAINING.rule(
    "gloo-on-gpus",
    finds="gloo as the backend of ranks that train on GPUs",
    reason="gloo sends the gradients through the host's memory and CPUs; NCCL sends them from "
    "GPU to GPU where the hardware allows it.",
    fix='write "nccl" where there are GPUs: "nccl" if torch.cuda.is_available() else "gloo"',
)
def _gloo(script: TrainingScript) -> Iterator[Violation[int]]:
    if not _trains_on_gpus(script):
        return
    for call in script.torch_calls("init_process_group"):
        if constant(call.argument("backend", 0)) == "gloo":
            yield Violation(call.node.lineno, "gradients of GPUs go through gloo")


@TRAINING.rule(
    "set-device-missing",
    finds="ranks that all use the first GPU of their node",
    reason="`cuda` without a number is GPU 0 for every rank: NCCL refuses a second rank there, "
    "or memory runs out.",
    fix='call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first',
)
def _no_device(script: TrainingScript) -> Iterator[Violation[int]]:
    if not script.joins_ranks or script.is_wrapped or script.torch_calls("set_device", "device"):
        return
    text = ast.unparse(script.tree)
    if re.search(r"CUDA_VISIBLE_DEVICES|device_id\b", text):
        return
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            attribute, given = node.func.attr, [constant(one) for one in node.args]
            if (attribute == "cuda" and not node.args and not node.keywords) or (
                attribute == "to" and given[:1] == ["cuda"]
            ):
                yield Violation(node.lineno, "every rank of a node uses the same GPU here")
                return


def _trains_on_gpus(script: TrainingScript) -> bool:
    text = ast.unparse(script.tree)
    return bool(re.search(r"\.cuda\(|\.to\(['\"]cuda|device\(['\"]cuda|set_device\(", text))
