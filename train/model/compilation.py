"""torch.compile: compiling modules, checking for success, cleaning up after a killed compiler.

We compile a module's `forward()`, not the module. torch never compiles the `forward()` of one of
its built-in layers by itself, so a piece that is an `nn.Linear` would stay as it is. Hooks around a
module, which gather parameters or exchange parts of a sequence, must not be compiled.
"""

import os
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from ..cli.config import Config
    from ..tasks.base import Task

BACKEND = "inductor"
UNFINISHED = "_CxxBuild"
"""Name of inductor's temporary folder, which exists while inductor builds the file beside it."""
MADE = (".so", ".o", ".gch")


def compile_whole(model: nn.Module, config: "Config") -> None:
    """Compile the whole model as one, under `--compile`.

    Under `--activation-checkpointing` the pieces are compiled one by one: see `model.prepare`.
    """
    if config.compile and not config.activation_checkpointing:
        compile_forward(model)


def compile_pieces(
    model: nn.Module, names: Sequence[str], config: "Config", *, cut: bool = False
) -> None:
    """Compile each piece of a model, or of some stages of it, by itself, under `--compile`.

    After tensor parallelism (`cut`), the hooks around a piece are compiled along with it. If a
    DTensor enters or leaves compiled code, torch (2.13) omits the pending sum of its gradient over
    the ranks. Within a piece it does not.
    """
    if not config.compile:
        return
    first_names: dict[nn.Module, str] = {}
    for name in names:
        # One module may be several pieces.
        first_names.setdefault(model.get_submodule(name), name)
    for module, name in first_names.items():
        if not config.activation_checkpointing:
            compile_forward(module)
        if not cut:
            continue
        if compiled := getattr(module, "_compiled_forward", None):
            compiled.take_hooks(module, name)
        else:
            # Ranks gather a view after an embedding, and torch fails to compile a module with a
            # view as input.
            module.register_forward_hook(lambda module, inputs, outputs: outputs.clone())


def compile_forward(module: nn.Module) -> None:
    """Compile a module's `forward()`, when it is first called."""
    # An embedding has nothing to compile; and the mask of a row-wise sharded one cannot leave
    # compiled code.
    if isinstance(module, nn.Embedding):
        return
    _clean_caches()
    # Each module may need recompilations: for training, for evaluation, and for the smaller last
    # batch of an evaluation. Beyond the limit, torch runs uncompiled code.
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, getattr(torch._dynamo.config, limit) + 4)
    compiled = _Compiled(module.forward, type(module))
    module.forward = compiled
    # Keep a reference, as something may be wrapped around forward().
    module._compiled_forward = compiled  # type: ignore[assignment]


class _Compiled:
    """A compiled `forward()`, and hooks that are compiled along with it."""

    def __init__(self, plain: Callable[..., Any], kind: type[nn.Module]) -> None:
        self._before: list[tuple[Callable[..., Any], bool]] = []
        self._after: list[tuple[Callable[..., Any], bool]] = []
        self._name: str | None = None
        before, after = self._before, self._after

        def run(*inputs: Any, **named: Any) -> Any:
            for hook, with_named in before:
                if with_named:
                    if (changed := hook(inputs, named)) is not None:
                        inputs, named = changed
                elif (changed := hook(inputs)) is not None:
                    inputs = changed if isinstance(changed, tuple) else (changed,)
            outputs = plain(*inputs, **named)
            for hook, with_named in after:
                arguments = (inputs, named, outputs) if with_named else (inputs, outputs)
                if (changed := hook(*arguments)) is not None:
                    outputs = changed
            return outputs

        # torch caches compiled code per Python code object, up to a limit: so each class gets its
        # own code object.
        run.__code__ = _codes.setdefault(kind, run.__code__.replace())
        self._run = torch.compile(run, backend=BACKEND)

    def take_hooks(self, module: nn.Module, name: str) -> None:
        self._name = name
        for number, hook in list(module._forward_pre_hooks.items()):
            with_named = number in module._forward_pre_hooks_with_kwargs
            self._before.append((partial(hook, module), with_named))
            del module._forward_pre_hooks[number]
        for number, hook in list(module._forward_hooks.items()):
            with_named = number in module._forward_hooks_with_kwargs
            self._after.append((partial(hook, module), with_named))
            del module._forward_hooks[number]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._name is not None and any(hasattr(value, "device_mesh") for value in inputs):
            raise UsageError(
                f"--compile: piece {self._name!r} receives a DTensor, and torch.compile computes "
                "its gradient wrongly; in tensor_plan(), give the piece before it "
                "use_local_output=True, or "
                "leave out --compile"
            )
        return self._run(*inputs, **named)


_codes: dict[type[nn.Module], CodeType] = {}


def check_compiled(task: "Task") -> None:
    """Make sure, after a training pass, that something has been compiled.

    Raises:
        UsageError: nothing has been compiled, so `--compile` would bring no speed.
    """
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        raise UsageError(
            f"--compile: torch.compile has compiled nothing of the model of task {task.name!r}: it "
            "sees no tensor operations in it, or TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is "
            "set; leave out --compile"
        )


@cache
def _clean_caches() -> None:
    """Clean inductor's caches once per process, before it compiles anything."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    # Inductor always keeps headers in the latter, whatever the user sets.
    for folder in {cache_dir(), default_cache_dir()}:
        remove_unfinished(Path(folder))


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove truncated libraries from one of inductor's caches; return them.

    The compiler writes them in place, and inductor assumes that an existing one is complete. After
    a process has been killed while compiling, every later start with that cache would fail.
    """
    removed = []
    with suppress(OSError):
        for own in [path for path in folder.iterdir() if path.is_dir()]:
            for path in own.iterdir():
                if _is_suspect(path):
                    locks = folder if own.name != "precompiled_headers" else own
                    removed += _remove(path, locks / "locks")
    return removed


def _remove(path: Path, locks: Path) -> list[Path]:
    """Remove a library, or the libraries beside a folder, unless a compiler holds their lock."""
    from filelock import FileLock, Timeout

    # A process that compiles holds the lock.
    lock = FileLock(locks / f"{path.name.partition('.')[0]}.lock", timeout=0)
    removed = []
    with suppress(OSError, Timeout), lock:
        if not _is_suspect(path):
            return []
        base = path.name.removesuffix(UNFINISHED)
        libraries = [path.with_name(base + suffix) for suffix in MADE]
        for library in [path] if path.suffix in MADE else libraries:
            if library.exists():
                library.unlink()
                removed.append(library)
        if path.is_dir():
            path.rmdir()
    return removed


def _is_suspect(path: Path) -> bool:
    """Whether a killed compiler left this path in the cache.

    A complete library ends with its table of sections.
    """
    if path.name.endswith(UNFINISHED):
        return path.is_dir()
    if path.suffix not in (".so", ".o") or not path.is_file() or sys.platform != "linux":
        return False
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    if header[4] != 2:  # not of 64 bits: no processor that torch is built for
        return False
    order = "<" if header[5] == 1 else ">"
    table: int = struct.unpack_from(f"{order}Q", header, 40)[0]
    each, count = struct.unpack_from(f"{order}HH", header, 58)
    return not 0 < table <= size - int(each) * int(count)
