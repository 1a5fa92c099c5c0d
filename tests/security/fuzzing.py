"""Shared by the fuzzers: odd values, mutations of valid input, and a guard around each input.

An input depends on its number alone, so that a failure can be repeated: `seed=…` of the message.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

COUNT = 2000
"""Inputs of each fuzzer in the gate; `make fuzz MINUTES=60` goes on for that long, with others."""

MINUTES = float(os.environ.get("TOOLKIT_FUZZ_MINUTES", "0"))
CPU_S = 10.0
"""An input that takes more of the processor's time is taken for a hang."""

CANARY = "canary-of-what-nobody-may-read"

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    10**30,
    0.5,
    1e308,
    math.inf,
    math.nan,
    "",
    " ",
    "-",
    "--",
    "-rf /",
    "\0",
    "a\nb",
    "\r",
    "\x1b]0;t\x07",
    "\u2028",
    "\ud800",
    "\ufeff",
    "é😀",
    "../../x",
    "/dev/zero",
    "~nobody-such/x",
    "$(touch made-by-a-shell)",
    "`touch made-by-a-shell`",
    "'; touch made-by-a-shell; '",
    "{{ 7 * 7 }}",
    "{% for i in range(99) %}x{% endfor %}",
    "%s%n%j",
    "9" * 5000,
    "x" * 3000,
    "1e9999",
    "0x1",
    "no",
    "~",
    "2001-01-01",
    "&a *a",
    [],
    {},
    [[]],
    {"": ""},
    {"a": {"b": {"c": []}}},
]

BYTES = [b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"\r\n", b"\t", b"{", b"}", b"[", b"]", b'"', b"'"]
BYTES += [b"#", b"---\n", b"\\", b"$", b"`", b"&", b"<<E\n", b"(", b")", b";", b"|", b"\x1b[2J"]


def deep(levels: int = 50_000) -> str:
    """A text of JSON, and of YAML, that is nested more deeply than it can be read."""
    return "[" * levels


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in items:
        yield from _places(one, (*at, key))


def mutated(rng: random.Random, value: Any) -> Any:
    """A document with a few of its values replaced, taken away, doubled or put elsewhere."""
    made = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.choice(list(_places(made)))
        if not at:
            if rng.random() < 0.05:
                made = copy.deepcopy(rng.choice(ODD))
            continue
        holder = made
        for key in at[:-1]:
            holder = holder[key]
        key = at[-1]
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2 if isinstance(holder, dict):
                holder[rng.choice(["x", "", "\0", "é", "__class__", "9" * 50])] = holder[key]
            case 3 if isinstance(holder, list):
                holder.insert(0, holder[key])
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
        if not isinstance(made, dict | list):
            return made
    return made


def torn(rng: random.Random, text: bytes) -> bytes:
    """A text with bytes put in, cut off, doubled or moved."""
    made = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 2, 10, 100)))
        match rng.randrange(5):
            case 0:
                del made[at:end]
            case 1:
                made[at:at] = rng.choice(BYTES)
            case 2:
                made[at:at] = made[at:end] * rng.choice((2, 20))
            case 3:
                other = rng.randrange(len(made) + 1)
                made[other:other] = made[at:end]
            case 4:
                made[at:at] = str(rng.choice(ODD)).encode("utf-8", "surrogatepass")
    return bytes(made)


def as_text(rng: random.Random, value: Any) -> str:
    """A document as JSON, which is YAML as well."""
    if rng.random() < 0.01:
        return deep()
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))


class _Hang(BaseException):
    """Not an Exception: nothing shall catch it."""


class _Guard:
    """Records the processes and connections that are started while an input is processed."""

    def __init__(self) -> None:
        self.on = False
        self.begun: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        forbidden = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
        if event in (*forbidden, "os.kill", "socket.connect", "pickle.find_class", "os.forkpty"):
            if event == "socket.connect" and "127.0.0.1" in repr(args):
                return
            self.begun.append(f"{event} {args!r}")


_GUARD = _Guard()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Fail if a process is started or signalled, a host connected to, or a time limit exceeded.

    Errors of the toolkit's own, which a user can mend, are allowed.
    """

    def hang(*_: object) -> None:
        raise _Hang(f"more than {CPU_S} s of the processor")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    _GUARD.begun.clear()
    _GUARD.on = True
    try:
        with contextlib.suppress(ToolkitError):
            yield
    finally:
        _GUARD.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert _GUARD.begun == []
    assert not Path("made-by-a-shell").exists()


def fuzz(
    attack: Callable[[random.Random], None], *, count: int = COUNT, again: Sequence[int] = ()
) -> None:
    """Try so many inputs, or for as long as `make fuzz` wants; those that have failed first."""
    first = 0 if not MINUTES else random.SystemRandom().randrange(1 << 40)
    deadline = time.monotonic() + MINUTES * 60
    for number in itertools.count(-len(again)):
        if number >= count and time.monotonic() >= deadline:
            return
        seed = first + number if number >= 0 else again[number]
        try:
            attack(random.Random(seed))
        except BaseException as error:
            error.add_note(f"{attack.__name__}: seed={seed}")
            raise
