"""Tasks whose model is changed after it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from train.tasks.base import Task

AnyTask = TypeVar("AnyTask", bound=Task)


def changed(base: type[AnyTask], change: Callable[[Any], object]) -> type[AnyTask]:
    """Make a task like another one, but for what `change` does to its model."""

    class Changed(base):  # type: ignore[valid-type, misc]
        def model(self) -> nn.Module:
            model = super().model()
            change(model)
            return model  # type: ignore[no-any-return]

    return Changed
