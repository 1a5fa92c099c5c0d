"""Rules about signals: the warning before the end, and the fate of the step."""

import re
from bisect import bisect_left
from collections.abc import Iterator

from toolkit.lint.registry import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import Call, Trap
from toolkit.lint.scripts.script import BatchScript
from toolkit.lint.scripts.values import Argument

__all__: list[str] = []

_NUMBERS = {"1": "HUP", "2": "INT", "3": "QUIT", "10": "USR1", "12": "USR2", "15": "TERM"}
_TORCHRUNS = frozenset({"TERM", "INT", "HUP", "QUIT"})
"""What torchrun answers by shutting its workers down (`--signals-to-handle`)."""

_NOT_SENT = frozenset({"EXIT", "0", "ERR", "DEBUG", "RETURN"})
"""What a trap may name beside signals."""

_SIGNAL = re.compile(r"(?:([RB]+):)?([A-Za-z0-9]+)(?:@\d+)?")


def _name(signal: str) -> str:
    plain = signal.upper().removeprefix("SIG")
    return _NUMBERS.get(plain, plain)


def _warning(script: BatchScript) -> tuple[int, str, bool] | None:
    """Return line and name of the signal before the end, and whether the batch shell gets it."""
    option = script.options.get("signal")
    match = _SIGNAL.fullmatch(option.value.text) if option and option.value else None
    if option is None or match is None:
        return None
    return option.line, _name(match[2]), "B" in (match[1] or "")


def _traps(script: BatchScript, signal: str) -> list[Trap]:
    return [t for t in script.walk.traps if signal in map(_name, t.signals)]


def _handled_by_torchrun(script: BatchScript, signal: str) -> bool:
    lists = [s.value.text for s in script.settings("PET_SIGNALS_TO_HANDLE")]
    for run in script.walk.torchruns:
        given = run.options.get("signals-to-handle")
        lists += [given.value.text] if given and given.value else []
    return signal in _TORCHRUNS or any(signal in map(_name, words.split(",")) for words in lists)


@SCRIPTS.rule(
    "signal-unhandled",
    finds="a warning by `--signal` that nothing in the script answers",
    reason="An unanswered signal ends the batch script, and with it the job, that much earlier; a "
    "trap that the signal does not reach never runs.",
    fix="with B:, add trap '…' USR1 and wait for srun in the background; else leave --signal out",
)
def _unhandled(script: BatchScript) -> Iterator[Violation[int]]:
    warning = _warning(script)
    if warning is None or not script.commands:
        return
    line, signal, to_shell = warning
    traps = _traps(script, signal)
    if to_shell and not traps:
        yield Violation(
            line,
            f"--signal=B:{signal} reaches the batch script, which has no trap for it and ends",
            fix=f"add trap 'kill -USR1 $step' {signal} and wait for srun in the background",
        )
    elif traps and not to_shell and not script.starts:
        yield Violation(
            traps[0].line,
            f"without B: --signal={signal} does not reach the batch script, and this trap "
            "never runs",
            fix=f"write --signal=B:{signal}@SECONDS",
        )


@SCRIPTS.rule(
    "signal-orphans",
    finds="`--signal=USR1@…` without `B:` for a step of torchruns",
    reason="Every process of the step gets the signal: it ends torchrun, and its workers live on "
    "without it.",
    fix="write --signal=B:USR1@SECONDS with a trap, or give torchrun --signals-to-handle with USR1",
)
def _orphans(script: BatchScript) -> Iterator[Violation[int]]:
    warning = _warning(script)
    if warning is None or warning[2] or not script.starts:
        return
    line, signal, _ = warning
    if not _handled_by_torchrun(script, signal):
        yield Violation(
            line,
            f"without B: every torchrun gets {signal} and ends, and its workers live on",
            fix=f"write --signal=B:{signal}@SECONDS and a trap that passes it on, or give torchrun "
            f"--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIG{signal}",
        )


@SCRIPTS.rule(
    "trap-blocked",
    finds="a trap for Slurm's warning above an srun in the foreground",
    reason="bash runs a trap after the command in the foreground has ended: too late.",
    fix="start srun with & and wait for it: srun … & wait $!",
)
def _blocked(script: BatchScript) -> Iterator[Violation[int]]:
    warning = _warning(script)
    if warning is None or not warning[2] or not _traps(script, warning[1]):
        return
    steps = [step for step in script.training if step.call.level == "batch"]
    if steps and not any(step.call.background for step in steps):
        yield Violation(
            steps[0].line, f"the trap for {warning[1]} runs when this srun has ended, not before"
        )


@SCRIPTS.rule(
    "wait-interrupted",
    finds="one `wait` for a step, in a script that traps signals",
    reason="A trapped signal ends `wait`: the script goes on, ends, and Slurm kills the step at "
    "its checkpoint.",
    fix='wait in a loop: while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done',
)
def _interrupted(script: BatchScript) -> Iterator[Violation[int]]:
    traps = [t for t in script.walk.traps if t.handler and {*map(_name, t.signals)} - _NOT_SENT]
    waits = [call for call in script.walk.calls if call.name == "wait"]
    background = [s for s in script.training if s.call.background and s.call.level == "batch"]
    if len(waits) != 1 or not traps or not background or waits[0].looped:
        return
    if waits[0].order < background[0].call.order or _handlers_end(script, traps):
        return
    yield Violation(
        waits[0].line,
        f"the signal of the trap in line {traps[-1].line} ends this wait, while srun still runs",
    )


def _handlers_end(script: BatchScript, traps: list[Trap]) -> bool:
    """Whether a handler ends the script, or has Slurm end it."""
    words = " ".join(trap.handler for trap in traps)
    names = {name for name in script.walk.functions if re.search(rf"\b{re.escape(name)}\b", words)}
    for call in script.walk.calls:
        if call.level != "handler" and call.function not in names:
            continue
        requeues = call.name == "scontrol" and [a.text for a in call.arguments[1:2]] == ["requeue"]
        if requeues or call.name in ("exit", "exec"):
            return True
    return False


@SCRIPTS.rule(
    "srun-sigterm",
    finds="SIGTERM for srun itself",
    reason="srun answers it by killing the step at once, by SIGKILL: there is no checkpoint.",
    fix='pass USR1 on, which srun forwards: kill -USR1 "$step"; or scancel --signal=TERM JOB.STEP',
)
def _sigterm(script: BatchScript) -> Iterator[Violation[int]]:
    steps = {step.call.order for step in script.walk.steps if step.call.background}
    started: dict[str, int] = {}
    background = [call.order for call in script.walk.calls if call.background]
    for setting in script.walk.settings:
        if [piece.name for piece in setting.value.pieces] == ["!"]:
            before = bisect_left(background, setting.call.order)
            if before and _begun(script, background[before - 1]) in steps:
                started[setting.name] = setting.call.order
    last = max(steps, default=None)
    for call in script.walk.calls:
        if call.name != "kill" or not _sends_term(call):
            continue
        names = {piece.name for target in call.arguments[1:] for piece in target.pieces}
        jobs = any(_is_job(target) for target in call.arguments[1:])
        direct = "!" in names and last is not None and last < call.order
        trapped = names & started.keys()
        since = min((started[name] for name in trapped), default=call.order)
        if since < call.order and _only_tests(script.walk.calls[since + 1 : call.order]):
            continue  # a signal while srun was being started: there is no step to lose yet
        if trapped or direct or (jobs and steps):
            yield Violation(call.line, "this SIGTERM makes srun kill the step at once")


def _begun(script: BatchScript, order: int) -> int:
    """Return the call that a shell started; what srun starts stands behind it."""
    call = script.walk.calls[order]
    while call.parent is not None and call.parent.background:
        call = call.parent
    return call.order


def _sends_term(call: Call) -> bool:
    words = [argument.text for argument in call.arguments[1:]]
    if not words or not words[0].startswith("-") or words[0] == "--":
        return True
    if words[0] in ("-s", "-n", "--signal"):
        return _name("".join(words[1:2])) == "TERM"
    return _name(words[0].lstrip("-").removeprefix("signal=")) == "TERM"


def _is_job(target: Argument) -> bool:
    return target.text in ("%1", "%+", "%%", "%srun") or target.text.startswith("$(jobs")


def _only_tests(calls: list[Call]) -> bool:
    return all(call.name in ("[", "[[", "test") for call in calls)
