"""Trees of tensors, for models and losses with more than one input, output or target.

These are torch's pytrees: dicts, lists, tuples and NamedTuples, nested in any way. A single tensor
is the smallest tree and the usual one, so it has a fast path.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec

from ..errors import UsageError

Tree: TypeAlias = Any
"""A tensor [samples, ...], or a dict, list, tuple or NamedTuple of trees.

All tensors of a tree have the same first dimension: the sample.
"""

ONLY = "inputs and targets are tensors, or dicts, lists, tuples and NamedTuples of tensors"


def mapped(function: Callable[[Tensor], object], tree: Tree) -> Tree:
    """Call a function on each tensor; return a tree of the same structure."""
    if isinstance(tree, Tensor):
        return function(tree)
    return _pytree.tree_map(function, tree)


def joined(trees: Sequence[Tree]) -> Tree:
    """Concatenate trees of the same structure along the sample dimension."""
    return _pytree.tree_map(lambda *parts: torch.cat(parts), *trees)


def tensors_of(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def sample_count(tree: Tree) -> int:
    """Count the samples; `len()` of a dict would count its keys."""
    return len(tree) if isinstance(tree, Tensor) else len(tensors_of(tree)[0])


def form_of(tree: Tree) -> TreeSpec | None:
    """Return the structure of a tree, without its leaves; `None`: a tensor."""
    return None if isinstance(tree, Tensor) else _pytree.tree_structure(tree)


def unflattened(leaves: Tree, form: TreeSpec | None) -> Tree:
    """Rebuild a tree from its leaves and its structure; a tensor is its own leaf."""
    return leaves if form is None else _pytree.tree_unflatten(leaves, form)


def named(name: str, tree: Tree) -> list[tuple[str, object]]:
    """Name all leaves of a tree that is called `name`, such as `inputs['image']`."""
    try:
        leaves, _ = _pytree.tree_flatten_with_path(tree)
    except ValueError:
        # The type was registered with torch without names.
        return [(f"{name}[{n}]", leaf) for n, leaf in enumerate(_pytree.tree_leaves(tree))]
    return [(f"{name}{_pytree.keystr(path)}", leaf) for path, leaf in leaves]


def described(name: str, tree: Tree) -> str:
    """Name the tensors of a tree with their shapes and types; '' without one."""
    return ", ".join(
        f"{path} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for path, leaf in named(name, tree)
        if isinstance(leaf, Tensor)
    )


def check(inputs: Tree, targets: Tree, *, task: str) -> None:
    """Make sure that all leaves are tensors with the same number of samples.

    Raises:
        UsageError: names the task and the leaf.
    """
    place = f"task {task!r}" if task else "the task"
    count, first = None, ""
    for name, tree in (("inputs", inputs), ("targets", targets)):
        leaves = named(name, tree)
        if not leaves:
            raise UsageError(
                f"{place}: {name} of its data hold no tensor ({tree!r}); {ONLY}, at least one"
            )
        for path, leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise UsageError(
                    f"{place}: {path} of its data is of type {type(leaf).__name__}; {ONLY}: make a "
                    "tensor of it, or leave it out"
                )
            if leaf.dim() == 0:
                raise UsageError(
                    f"{place}: {path} of its data is a single number; the first dimension of every "
                    "tensor is the sample: give a number for each"
                )
            if count is None:
                count, first = len(leaf), path
            elif len(leaf) != count:
                raise UsageError(
                    f"{place}: its data hold {count} samples of {first}, but {len(leaf)} of "
                    f"{path}: give one of each for every sample"
                )


def near(one: Tensor, other: Tensor, far: float) -> bool:
    """Whether the norm of the difference is at most `far` times that of one tensor.

    Infinities, as of a mask, must be the same in both.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    distance = (one - other).masked_fill_(same, 0).norm()
    return bool(distance <= far * one.masked_fill(~one.isfinite(), 0).norm())
