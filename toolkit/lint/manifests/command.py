"""What a container starts: torchrun and its options, and the shell around it."""

import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.lint.manifests.pods import Container, Pods, containers_of
from toolkit.lint.scripts.calls import Torchrun, Walk
from toolkit.lint.scripts.script import read_batch_script
from toolkit.text.manifests import Stream
from toolkit.text.quantities import parse_duration

__all__ = ["SHUTDOWN_TIMEOUT_S", "Launch", "launches", "seconds", "shell_of"]

SHUTDOWN_TIMEOUT_S = 30
"""torchrun's default time for its workers to stop, in seconds (torch, elastic agent)."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A torchrun that a container starts."""

    container: Container
    given: Mapping[str, str]
    """Its options by their long names; unknown parts are empty."""

    shell: str
    """The shell that is the container's first process; empty where torchrun is."""

    script: str
    """What that shell runs."""

    passes: bool
    """Whether SIGTERM reaches torchrun."""

    maps: bool
    """Whether the shell decides about the exit status."""

    @property
    def pods(self) -> Pods:
        """The pods that it runs in."""
        return self.container.pods

    def option(self, name: str) -> str | None:
        """Return an option, given on the command line or as `PET_…`; None where it is not."""
        if name in self.given:
            return self.given[name]
        variable = f"PET_{name.upper().replace('-', '_')}"
        if variable in self.container.env:
            return self.container.variable(variable) or ""
        return "" if variable in self.script else None


@functools.lru_cache(maxsize=1)
def launches(stream: Stream) -> tuple[Launch, ...]:
    """Return every torchrun of a stream."""
    parsed = (_launch(container) for container in containers_of(stream))
    return tuple(launch for launch in parsed if launch is not None)


def _launch(container: Container) -> Launch | None:
    words = container.words
    outer = _walked(shlex.join(words))
    if outer is None:
        return None
    shell, script, rest = shell_of(words)
    inner = rest if '"$@"' in script or "exec $@" in script else []
    started = _walked(shlex.join(inner)) if inner else outer
    if started is None or not started.torchruns:
        return None
    torchrun = started.torchruns[0]
    passed = not shell or _passes(shell, script, outer, None if inner else torchrun)
    return Launch(
        container=container,
        given={name: o.value.text if o.value else "" for name, o in torchrun.options.items()},
        shell=shell,
        script=script,
        passes=passed,
        maps=bool(shell) and any(call.name in ("exit", "return") for call in outer.calls),
    )


@functools.lru_cache(maxsize=32)
def _walked(text: str) -> Walk | None:
    """Return what a command does; None where it cannot be read."""
    if "torchrun" not in text and "torch.distributed" not in text and "$@" not in text:
        return None
    try:
        return read_batch_script(f"#!/bin/bash\n{text}\n", "").walk
    except InputError:
        return None


def shell_of(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the shell that words start, its script and that script's arguments."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _SHELLS:
            after = words[index + 1 :]
            for place, option in enumerate(after):
                if option.startswith("-") and not option.startswith("--") and "c" in option:
                    rest = after[place + 1 :]
                    return name, rest[0] if rest else "", rest[2:]
                if not option.startswith(("-", "+")):
                    break
            return "", "", []
        if name in ("exec", "torchrun") or name.startswith("python"):
            break
    return "", "", []


def _passes(shell: str, script: str, walk: Walk, torchrun: Torchrun | None) -> bool:
    """Whether a shell that runs torchrun lets SIGTERM through to it.

    `exec` does, and a trap with the child in the background. bash puts a single command in its
    own place; dash, which is `sh` on Debian and Ubuntu, does not.
    """
    if any("TERM" in trap.signals or "15" in trap.signals for trap in walk.traps):
        return True
    if torchrun is None:
        return 'exec "$@"' in script or "exec $@" in script
    if torchrun.call.name == "exec":
        return torchrun.call.piped_to is None
    inside = [call for call in walk.calls if call.parent is not None]
    return shell == "bash" and len(inside) == 1 and torchrun.call.piped_to is None


def seconds(text: str | None) -> int | None:
    """Return the seconds of an option's value; None if it is not a number.

    >>> seconds("60"), seconds("1.5"), seconds(""), seconds(None)
    (60, 2, None, None)
    """
    try:
        return parse_duration(f"{text}s") if text else None
    except ValueError:
        return None
