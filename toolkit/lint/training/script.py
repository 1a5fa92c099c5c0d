"""A training script: its syntax tree, names, loops and conditions."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from toolkit.errors import InputError

MOST_CHARACTERS = 1 << 18
"""Maximum number of characters; longer files are not hand-written."""

_MOST_CALLS = 300
"""Maximum number of calls per kind, so that the work stays linear in the script's length."""

_RANK = re.compile(
    r"(?:^|_)rank$|^(?:is_)?(?:main|master|primary|chief|rank_?(?:0|zero))(?:_process|_rank)?$",
    re.I,
)
"""Names of variables that identify the rank."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class Called:
    """A call with its full name, such as `torch.distributed.barrier`."""

    node: ast.Call
    name: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def argument(self, name: str, place: int | None = None) -> ast.expr | None:
        """Return an argument by name or position; None if it is missing."""
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        if place is not None and place < len(self.node.args):
            given = self.node.args[: place + 1]
            if not any(isinstance(one, ast.Starred) for one in given):
                return given[place]
        return None

    @property
    def is_open(self) -> bool:
        """Whether more arguments may come from `*args` or `**kwargs`."""
        starred = any(isinstance(one, ast.Starred) for one in self.node.args)
        return starred or any(keyword.arg is None for keyword in self.node.keywords)


class TrainingScript:
    """A Python script, with the queries that rules need."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }
        self._full_names = _imported(tree)

    # ---- Calls

    @cached_property
    def calls(self) -> Sequence[Called]:
        """All calls with a name, in line order."""
        found = [
            Called(node, name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and (name := self.full_name(node.func))
        ]
        return sorted(found, key=lambda call: (call.node.lineno, call.node.col_offset))

    def torch_calls(self, *lasts: str) -> list[Called]:
        """Return the torch calls with one of these last names."""
        calls = (c for c in self.calls if c.last in lasts and c.name.startswith("torch."))
        return list(islice(calls, _MOST_CALLS))

    def methods(self, *names: str) -> list[ast.Call]:
        """Return the calls of methods with these names, on any object."""
        calls = (
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
        )
        return list(islice(calls, _MOST_CALLS))

    def full_name(self, node: ast.expr) -> str:
        """Return the full name of an expression; empty for other expressions than names.

        `nn.Linear` after `from torch import nn` is `torch.nn.Linear`.
        """
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self._full_names.get(node.id, node.id))
        return ".".join(reversed(parts))

    @cached_property
    def joins_ranks(self) -> bool:
        """Whether the script itself connects several ranks."""
        return bool(self.torch_calls("init_process_group", "init_device_mesh"))

    @cached_property
    def is_wrapped(self) -> bool:
        """Whether a library such as Accelerate or Lightning prepares the model and the loaders."""
        heads = {name.partition(".")[0] for name in self._full_names.values()}
        others = {
            "accelerate",
            "lightning",
            "pytorch_lightning",
            "transformers",
            "ray",
            "deepspeed",
        }
        return not heads.isdisjoint(others)

    @cached_property
    def classes(self) -> dict[str, str]:
        """The source of each class, by class name."""
        nodes = ast.walk(self.tree)
        return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.ClassDef)}

    # ---- Enclosing nodes

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the enclosing nodes, innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function around a node."""
        return next((one for one in self.parents(node) if isinstance(one, Function)), None)

    def loops_of(self, node: ast.AST) -> list[Loop]:
        """Return the loops around a node within its function, innermost first."""
        loops: list[Loop] = []
        for parent in self.parents(node):
            if isinstance(parent, Function | ast.Lambda | ast.ClassDef):
                break
            if isinstance(parent, Loop):
                loops.append(parent)
        return loops

    def conditions_of(self, node: ast.AST) -> Iterator[tuple[ast.If, bool]]:
        """Yield each `if` around a node within its function, and whether the node is in `else`."""
        child = node
        for parent in self.parents(node):
            if isinstance(parent, Function | ast.Lambda | ast.ClassDef):
                return
            if isinstance(parent, ast.If) and child is not parent.test:
                yield parent, child in parent.orelse
            child = parent

    def rank_guards(self, node: ast.AST) -> dict[ast.If, bool]:
        """Return each `if` that lets only some ranks reach a node, and whether it is in `else`.

        The innermost comes first.
        """
        return {test: other for test, other in self.conditions_of(node) if about_rank(test.test)}

    # ---- Values of names

    def values_of(self, name: str) -> list[ast.expr]:
        """Return the values assigned to a name, anywhere in the script."""
        return self._assigned.get(name, [])

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = [node.target]
            else:
                continue
            assert node.value is not None
            for target in targets:
                for name, value in _pairs(target, node.value):
                    values.setdefault(name, []).append(value)
        return values

    def comes_from(self, node: ast.expr, *lasts: str, module: str = "torch.") -> bool:
        """Whether an expression is, or names, the result of one of these calls of a module."""
        values = self.values_of(node.id) if isinstance(node, ast.Name) else [node]
        return any(
            isinstance(value, ast.Call)
            and (name := self.full_name(value.func)).startswith(module)
            and name.rpartition(".")[2] in lasts
            for value in values
        )


def about_rank(test: ast.expr) -> bool:
    """Whether a condition distinguishes ranks; -1 stands for a single process.

    >>> about_rank(ast.parse("rank == 0", mode="eval").body)
    True
    >>> about_rank(ast.parse("step % 10 == 0", mode="eval").body)
    False
    >>> about_rank(ast.parse("RANK != -1 and world_size > 1", mode="eval").body)
    False
    """
    for node in _outside_of_comparisons_with_minus_1(test):
        name = node.id if isinstance(node, ast.Name) else ""
        name = node.attr if isinstance(node, ast.Attribute) else name
        if name == "get_rank" or _RANK.search(name):
            return True
        if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK"):
            return True
    return False


def _outside_of_comparisons_with_minus_1(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.comparators) == 1:
        sides = (node.left, *node.comparators)
        if any(isinstance(one, ast.UnaryOp) and ast.unparse(one) == "-1" for one in sides):
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_of_comparisons_with_minus_1(child)


def constant(node: ast.expr | None) -> object:
    """Return the value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def read_training_script(text: str, source: str) -> TrainingScript:
    """Parse a script without running any of its code.

    Raises:
        InputError: the script is not valid Python, has too many characters or is nested too deeply.
    """
    if len(text) > MOST_CHARACTERS:
        message = f"has {len(text)} characters; a script has {MOST_CHARACTERS} at most"
        raise InputError(message, place=source)
    try:
        return TrainingScript(ast.parse(text))
    except SyntaxError as error:
        place = source if error.lineno is None else f"{source}:{error.lineno}"
        raise InputError(f"not valid Python: {error.msg}; fix it first", place=place) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        raise InputError(f"cannot be read as Python: {reason}", place=source) from None


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full names of imports, by local name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                head = one.name.partition(".")[0]
                names[one.asname or head] = one.name if one.asname else head
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                names[one.asname or one.name] = f"{node.module}.{one.name}"
    return names


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name of a target with its value, as far as the script shows."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, own in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, own)
