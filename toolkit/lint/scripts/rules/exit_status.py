"""The rule that a script must return the exit status of its training."""

import re
from collections.abc import Iterator
from itertools import islice

from toolkit.lint.bash import ast
from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import Call
from toolkit.lint.scripts.script import BatchScript

_HARMLESS = frozenset({":", "true", "echo", "printf", "date", "sleep", "say", "log"})
"""Commands that always succeed."""

# Limits that keep the work linear in the length of the script; a status test follows soon.
_MOST_WORK, _MOST_AFTER = 200, 500

_ASKS = re.compile(r"\$\{?(\?|PIPESTATUS)")
_ONE_STATUS = re.compile(r"\$\{?\?\}? (?:-eq|==?) [1-9]")
"""A test for one kind of failure: after any other one, an `if` without `else` succeeds."""


@SCRIPTS.rule(
    "failure-masked",
    finds="a training command with a lost exit status",
    reason="A job ends with the exit status of its script: Slurm reports COMPLETED, and jobs that "
    "depend on its success start.",
    fix="write set -eo pipefail at the top, or end the script with the status of srun",
)
def _masked(script: BatchScript) -> Iterator[Violation[int]]:
    work: dict[int, Call] = {id(step.call.node): step.call for step in script.training}
    for run in script.walk.torchruns:
        if run.step is None and not run.call.captured:
            work[id(run.call.node)] = run.call
    if not work and script.directives and script.python:
        work[id(script.python[-1].node)] = script.python[-1]  # the calls above prepare it
    batch = ((key, call) for key, call in work.items() if call.level == "batch")
    work = dict(islice(batch, _MOST_WORK))
    yield from _Flow(script, work).violations(script.commands, ends=True)
    yield from _functions(script)


def _functions(script: BatchScript) -> Iterator[Violation[int]]:
    """Find functions that train in the background, followed only by `wait` without a process."""
    working = {step.call.function for step in script.training}
    working |= {run.call.function for run in script.walk.torchruns}
    working.discard("")
    calls = script.walk.calls
    started = [c for c in calls if c.name in working and c.background and not c.function]
    if not started:
        return
    first = min(call.order for call in started)
    waits = [c for c in calls if c.name == "wait" and c.order > first and not c.background]
    if waits and all(len(wait.arguments) == 1 for wait in waits):
        yield Violation(
            waits[0].line,
            f"wait without a process succeeds even where {started[0].name} has failed",
            fix=f'write step=$! below {started[0].name} … & and wait "$step"',
        )


class _Flow:
    def __init__(self, script: BatchScript, work: dict[int, Call]) -> None:
        self.script = script
        self.work = work

    def violations(self, commands: ast.CommandList, *, ends: bool) -> Iterator[Violation[int]]:
        """Yield a violation wherever a list of commands loses the status of a training.

        `ends`: whether the status of the last command is tested or becomes the script's status.
        """
        for index, item in enumerate(commands):
            after = commands[index + 1 : index + 1 + _MOST_AFTER]
            for place, pipeline in enumerate(item.pipelines):
                for call in (self.work[id(n)] for n in pipeline.nodes if id(n) in self.work):
                    if item.background:
                        yield from self._waited_for(call, after)
                    elif violation := self._lost(call, item, place, after, ends=ends):
                        yield violation
                for node in pipeline.nodes:
                    if isinstance(node, ast.Compound) and not item.background:
                        counts = self._kept(item, place, after, ends=ends)
                        for inner in node.bodies:
                            yield from self.violations(inner, ends=counts)

    def _lost(
        self, call: Call, item: ast.AndOr, place: int, after: ast.CommandList, *, ends: bool
    ) -> Violation[int] | None:
        last = item.pipelines[place].nodes[-1]
        if last is not call.node and not call.pipefail and not self._asked(after, "PIPESTATUS"):
            name = last.name if isinstance(last, ast.SimpleCommand) else "what follows"
            return Violation(
                call.line,
                f"the status of this pipeline is that of {name}, not of {call.name}",
                fix="write set -o pipefail above",
            )
        if self._kept(item, place, after, ends=ends, errexit=call.errexit):
            return None
        return Violation(call.line, f"{call.name} may fail here, and the script still succeeds")

    def _kept(
        self,
        item: ast.AndOr,
        place: int,
        after: ast.CommandList,
        *,
        ends: bool,
        errexit: bool = False,
    ) -> bool:
        """Whether the script uses the status of a pipeline after its list."""
        if item.pipelines[place].negated:
            return True
        if "||" in item.operators[place:]:
            pipeline = item.pipelines[item.operators.index("||", place) + 1]
            first = pipeline.nodes[0]
            if isinstance(first, ast.SimpleCommand) and first.assignments and not first.words:
                return self._used_later(first)
            return not _harmless(pipeline)
        if errexit and place == len(item.pipelines) - 1:
            return True
        return self._asked(after) if after else ends

    def _asked(self, after: ast.CommandList, word: str = "") -> bool:
        """Whether the next commands test the exit status and act on it."""
        if not after:
            return False
        first = after[0].pipelines[0].nodes[0]
        if isinstance(first, ast.SimpleCommand):
            if first.name in ("exit", "return") and len(first.words) == 1:
                return True
            words = [*first.words, *(a.value for a in first.assignments)]
            if not any(_ASKS.search(w.shown) and word in w.shown for w in words):
                return False
            if first.assignments and not first.words:
                return self._used_later(first)
            return first.name not in ("echo", "printf")
        if isinstance(first, ast.Compound):
            conditions = [node for c in first.conditions for node in _nodes(c)]
            words = [w for n in conditions if isinstance(n, ast.SimpleCommand) for w in n.words]
            condition = " ".join(word.shown for word in (*words, *first.words))
            if len(first.bodies) == 1 and _ONE_STATUS.search(condition):
                return False
            return _ASKS.search(condition) is not None and word in condition
        return False

    def _used_later(self, command: ast.SimpleCommand) -> bool:
        """Whether a variable with the status is used again, other than to print it."""
        names = {assignment.name for assignment in command.assignments}
        for call in self.script.walk.calls:
            node = call.node
            if node.line < command.line or call.name in ("echo", "printf") or node is command:
                continue
            for word in (*node.words, *(a.value for a in node.assignments)):
                variables = (part.text for part in word.parts if part.kind == "variable")
                if names & {variable.partition("[")[0] for variable in variables}:
                    return True
        source = "\n".join(self.script.text.splitlines()[command.line :])
        arithmetic = rf"\(\([^)]*\b({'|'.join(map(re.escape, names))})\b"
        return re.search(arithmetic, source) is not None

    def _waited_for(self, call: Call, after: ast.CommandList) -> Iterator[Violation[int]]:
        """Find a `wait` that masks a failure; `wait` without a process always succeeds."""
        calls = self.script.walk.calls
        # In the background, wait is a child process without children.
        waits = [c for c in calls if c.name == "wait" and c.order > call.order and not c.background]
        if not waits or call.function:
            return  # srun-without-wait reports a missing wait
        bare = [wait for wait in waits if len(wait.arguments) == 1]
        if len(bare) == len(waits):
            yield Violation(
                bare[0].line,
                f"wait without a process succeeds even where {call.name} has failed",
                fix='write step=$! below srun … & and wait "$step"',
            )
            return
        work = {id(wait.node): wait for wait in waits if len(wait.arguments) > 1}
        lost = list(_Flow(self.script, work).violations(after, ends=True))
        if work and len(lost) >= len(work):
            yield lost[0]


def _harmless(pipeline: ast.Pipeline) -> bool:
    """Whether a list after `||` always succeeds."""
    nodes: list[ast.Node] = []
    for node in pipeline.nodes:
        bodies = node.bodies if isinstance(node, ast.Compound) else None
        nodes += [node] if bodies is None else [n for body in bodies for n in _nodes(body)]
    return all(isinstance(node, ast.SimpleCommand) and node.name in _HARMLESS for node in nodes)


def _nodes(commands: ast.CommandList) -> Iterator[ast.Node]:
    for item in commands:
        for pipeline in item.pipelines:
            for node in pipeline.nodes:
                yield node
                if isinstance(node, ast.Compound):
                    for inner in (*node.conditions, *node.bodies):
                        yield from _nodes(inner)
                if isinstance(node, ast.FunctionDefinition) and isinstance(node.body, ast.Compound):
                    for inner in node.body.bodies:
                        yield from _nodes(inner)
