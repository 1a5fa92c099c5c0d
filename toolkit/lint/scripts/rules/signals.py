"""Rules about signals: the warning before the time limit, and signals that end the step."""

import re
from bisect import bisect_left
from collections.abc import Iterator

from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import Call, Trap
from toolkit.lint.scripts.script import BatchScript

_NUMBERS = {"1": "HUP", "2": "INT", "3": "QUIT", "10": "USR1", "12": "USR2", "15": "TERM"}
_TORCHRUNS = frozenset({"TERM", "INT", "HUP", "QUIT"})
"""The signals on which torchrun shuts down its workers (`--signals-to-handle`)."""

_NOT_SENT = frozenset({"EXIT", "0", "ERR", "DEBUG", "RETURN"})
"""Conditions of `trap` that are not signals."""

_JOBS = ("%1", "%+", "%%", "%srun")
_SIGNAL = re.compile(r"(?:([RB]+):)?([A-Za-z0-9]+)(?:@\d+)?")


def _name(signal: str) -> str:
    plain = signal.upper().removeprefix("SIG")
    return _NUMBERS.get(plain, plain)


def _warning(script: BatchScript) -> tuple[int, str, bool] | None:
    """Return the line and name of the warning signal, and whether the batch shell receives it."""
    option = script.options.get("signal")
    if option is None or (match := _SIGNAL.fullmatch(option.text)) is None:
        return None
    return option.line, _name(match[2]), "B" in (match[1] or "")


def _traps(script: BatchScript, signal: str) -> list[Trap]:
    return [t for t in script.walk.traps if signal in map(_name, t.signals)]


@SCRIPTS.rule(
    "signal-unhandled",
    finds="a warning by `--signal` that nothing in the script answers",
    reason="An unanswered signal ends the batch script, and with it the job, that much earlier; a "
    "trap that the signal does not reach never runs.",
    fix="write B: and trap '…' USR1, and wait for srun in the background; or leave --signal out",
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
    reason="torchrun gets the signal and ends. Its workers die with the step, or live on without "
    "torchrun if they handle the signal (without proctrack/cgroup, they get it too).",
    fix="write --signal=B:USR1@SECONDS with a trap, or give torchrun --signals-to-handle with USR1",
)
def _orphans(script: BatchScript) -> Iterator[Violation[int]]:
    warning = _warning(script)
    if warning is None or warning[2] or not script.starts:
        return
    line, signal, _ = warning
    lists = [setting.value.text for setting in script.settings("PET_SIGNALS_TO_HANDLE")]
    options = [run.options.get("signals-to-handle") for run in script.walk.torchruns]
    lists += [option.text for option in options if option]
    handled = {_name(word) for words in lists for word in words.split(",")}
    if signal not in _TORCHRUNS | handled:
        yield Violation(
            line,
            f"without B: every torchrun gets {signal} and ends, and its workers save nothing",
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
    if script.supervised or warning is None or not warning[2] or not _traps(script, warning[1]):
        return
    steps = [step for step in script.training if step.call.level == "batch"]
    if steps and not any(step.call.background for step in steps):
        what = f"the trap for {warning[1]} runs when this srun has ended, not before"
        yield Violation(steps[0].line, what)


@SCRIPTS.rule(
    "wait-interrupted",
    finds="one `wait` for a step, in a script that traps signals",
    reason="A trapped signal interrupts `wait`: the script continues and exits, and Slurm kills "
    "the step during its checkpoint.",
    fix='wait in a loop: while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done',
)
def _interrupted(script: BatchScript) -> Iterator[Violation[int]]:
    traps = [t for t in script.walk.traps if t.handler and {*map(_name, t.signals)} - _NOT_SENT]
    waits = [call for call in script.walk.calls if call.name == "wait"]
    background = [s for s in script.training if s.call.background and s.call.level == "batch"]
    if len(waits) != 1 or not traps or not background or waits[0].looped:
        return
    if waits[0].order < background[0].call.order:
        return
    handlers = " ".join(trap.handler for trap in traps)
    names = {n for n in script.walk.functions if re.search(rf"\b{re.escape(n)}\b", handlers)}
    for call in script.walk.calls:
        requeues = call.name == "scontrol" and call.words[1:2] == ["requeue"]
        ends = requeues or call.name in ("exit", "exec")
        if ends and (call.level == "handler" or call.function in names):
            return  # a handler ends the script, or makes Slurm end it
    what = f"the signal of the trap in line {traps[-1].line} ends this wait, while srun still runs"
    yield Violation(waits[0].line, what)


@SCRIPTS.rule(
    "srun-sigterm",
    finds="SIGTERM sent to srun itself",
    reason="srun responds by killing the step at once with SIGKILL, without a checkpoint.",
    fix='pass USR1 on, which srun forwards: kill -USR1 "$step"; or scancel --signal=TERM JOB.STEP',
)
def _sigterm(script: BatchScript) -> Iterator[Violation[int]]:
    if script.supervised:
        return
    steps = {step.call.order for step in script.walk.steps if step.call.background}
    started: dict[str, int] = {}
    background = [call.order for call in script.walk.calls if call.background]
    for setting in script.walk.settings:
        if [piece.name for piece in setting.value.pieces] == ["!"]:
            before = bisect_left(background, setting.call.order)
            if not before:
                continue
            call = script.walk.calls[background[before - 1]]
            while call.parent is not None and call.parent.background:
                call = call.parent  # the call that the batch shell started
            if call.order in steps:
                started[setting.name] = setting.call.order
    last = max(steps, default=None)
    for call in script.walk.calls:
        if call.name != "kill" or not _sends_term(call):
            continue
        names = {piece.name for target in call.arguments[1:] for piece in target.pieces}
        jobs = any(w in _JOBS or w.startswith("$(jobs") for w in call.words[1:])
        direct = "!" in names and last is not None and last < call.order
        trapped = names & started.keys()
        since = min((started[name] for name in trapped), default=call.order)
        between = script.walk.calls[since + 1 : call.order]
        if since < call.order and all(one.name in ("[", "[[", "test") for one in between):
            continue  # a signal during the start of srun does not lose a step
        if trapped or direct or (jobs and steps):
            yield Violation(call.line, "this SIGTERM makes srun kill the step at once")


def _sends_term(call: Call) -> bool:
    words = call.words[1:]
    if not words or not words[0].startswith("-") or words[0] == "--":
        return True
    if words[0] in ("-s", "-n", "--signal"):
        return _name("".join(words[1:2])) == "TERM"
    return _name(words[0].lstrip("-").removeprefix("signal=")) == "TERM"
