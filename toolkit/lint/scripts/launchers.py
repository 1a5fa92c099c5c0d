"""The launchers of PyTorch ranks; rules read their options under torchrun's names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.lint.scripts.options import TORCHRUN, Grammar
from toolkit.lint.scripts.values import Argument


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that starts ranks."""

    name: str
    grammar: Grammar = TORCHRUN

    def flag(self, name: str) -> str:
        """Return the launcher's name for a torchrun option, with dashes."""
        for written, known in self.grammar.others.items():
            if known == name:
                return f"--{written.replace('-', '_')}"
        return f"--{name}"


TORCHRUN_LAUNCHER = Launcher(name="torchrun")

AGENTS = frozenset({"torchrun", "accelerate launch", "tune run", "dlrover-run"})
"""Launchers built on torchrun, with its agents, restarts and exit barrier."""

WITH_RDZV_ID = AGENTS - {"accelerate launch"}
"""Launchers that accept `--rdzv-id` and count workers per node."""


def _grammar(others: Mapping[str, str], flags: frozenset[str] = frozenset()) -> Grammar:
    return replace(
        TORCHRUN,
        short={},
        flags=TORCHRUN.flags | flags,
        names=TORCHRUN.names | set(others.values()),
        others=others,
    )


_ACCELERATE = Launcher(
    name="accelerate launch",
    grammar=_grammar(
        {
            "config-file": "config-file",
            "machine-rank": "node-rank",
            "main-process-ip": "master-addr",
            "main-process-port": "master-port",
            "num-machines": "nnodes",
            "num-processes": "num-processes",
        },
        frozenset(
            {"cpu", "multi-gpu", "tpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "quiet"}
            | {"same-network", "debug", "use-mps-device", "use-parallelism-config"}
        ),
    ),
)
_DEEPSPEED = Launcher(
    name="deepspeed",
    grammar=_grammar(
        {"num-nodes": "nnodes", "num-gpus": "nproc-per-node", "hostfile": "hostfile"}
        | {"launcher": "launcher"},
        frozenset({"no-ssh", "no-ssh-check", "no-local-rank", "enable-each-rank-log"}),
    ),
)
_COMPOSER = Launcher(
    name="composer", grammar=_grammar({"nproc": "nproc-per-node", "world-size": "world-size"})
)
_TUNE = Launcher(name="tune run")
_DLROVER = Launcher(
    name="dlrover-run",
    grammar=_grammar(
        {}, frozenset({"network-check", "exclude-straggler", "auto-config", "auto-tunning"})
    ),
)

_PYTHON = re.compile(r"python[0-9.]*")
_WRAPPER = re.compile(r"torchrun([-_]\w+)?")
"""torchrun, and the names that sites give to torchrun wrappers."""

_MODULES = {
    "torch.distributed.run": TORCHRUN_LAUNCHER,
    "torch.distributed.launch": TORCHRUN_LAUNCHER,
    "accelerate.commands.launch": _ACCELERATE,
    "accelerate.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "composer": _COMPOSER,
}


def launcher_of(
    name: str, arguments: Sequence[Argument]
) -> tuple[Launcher, Sequence[Argument]] | None:
    """Return a program's launcher and the words with its options; None for other programs."""
    verb = arguments[0].text if arguments else ""
    if _WRAPPER.fullmatch(name):
        return TORCHRUN_LAUNCHER, arguments
    if (name, verb) == ("accelerate", "launch"):
        return _ACCELERATE, arguments[1:]
    if (name, verb) == ("tune", "run"):
        return _TUNE, arguments[1:]
    if name in ("deepspeed", "composer") and any(
        argument.text.startswith("-") or argument.text.endswith(".py") for argument in arguments
    ):  # otherwise the name of an environment or a module
        return (_DEEPSPEED if name == "deepspeed" else _COMPOSER), arguments
    if name == "dlrover-run":
        return _DLROVER, arguments
    return _of_module(arguments) if _PYTHON.fullmatch(name) else None


def _of_module(arguments: Sequence[Argument]) -> tuple[Launcher, Sequence[Argument]] | None:
    """Return the launcher that `python -m` runs, and the words with its options."""
    for index, argument in enumerate(arguments):
        if argument.text == "-m":
            module = arguments[index + 1 : index + 2]
            launcher = _MODULES.get(module[0].text) if module else None
            return (launcher, arguments[index + 2 :]) if launcher else None
        if not argument.text.startswith("-"):
            return None
    return None
