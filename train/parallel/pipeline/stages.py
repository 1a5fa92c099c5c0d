"""A model cut in pipeline stages: which pieces are whose, and a module that holds some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import nn

from train.errors import UsageError
from train.model.trees import Tree
from train.parallel.base import Parts
from train.parallel.pipeline import split


class Stage(nn.Module):
    """Some successive pieces of a model, under the names that they have in it."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take pieces out of the model."""
        super().__init__()
        # Underscored: no piece is called so.
        self._names, self._autocast = tuple(names), autocast
        for name in names:
            *path, last = name.split(".")
            home: nn.Module = self
            for step in path:
                if step not in home._modules:
                    home.add_module(step, nn.Module())
                home = home.get_submodule(step)
            home.add_module(last, model.get_submodule(name))

    def forward(self, hidden: Tree) -> Tree:
        """Run the pieces, one after the other."""
        # Here, not around the schedule, which would run backward passes in it as well.
        with self._autocast():
            for name in self._names:
                hidden = self.get_submodule(name)(hidden)
        return hidden


def plan(model: nn.Module, parts: Parts) -> list[list[str]]:
    """Name the pieces of each stage.

    Raises:
        UsageError: there are too few, or the model is more than its pieces.
    """
    config, layout, task = parts.config, parts.layout, parts.task
    sizes = {
        name: sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        for name in task.pieces(model)
    }
    count = split.stage_count(config.pp_schedule, layout.pp)
    asked = f"--pp {layout.pp} with --pp-schedule {config.pp_schedule}"
    groups = split.cut(sizes, count, asked=asked)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        if not any(within(name, own) for own in groups):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UsageError(
                f"{asked}: no stage would hold {kind} {name!r}, as no piece of task {task.name!r} "
                f"contains it ({', '.join(sizes)}); have pieces() name its module"
            )
    return groups


def within(name: str, pieces: Sequence[str]) -> bool:
    """Say whether a tensor of that name belongs to one of these pieces."""
    return any(name.startswith(f"{piece}.") for piece in pieces)
