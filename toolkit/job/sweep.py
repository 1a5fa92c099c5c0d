"""Sweeps: one job at many points that differ in arguments and variables. Pure."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from toolkit.job import types
from toolkit.text import secret_scan
from toolkit.text.yaml_reader import Document, KeyPath, dotted

MOST_POINTS = 100_000
"""The most points of a sweep; Slurm limits an array (MaxArraySize) to 1001 by default."""

NAME_LENGTH = 72
"""The longest name of a point, in characters; file systems take 255 bytes."""

_OPTION = "--[A-Za-z0-9][-A-Za-z0-9_.]*"
SWEEP_KEY = f"{_OPTION}|env\\.(?!(?:{types.RESERVED_NAMES.pattern})$){types.ENV_NAME}"


def _check_key(key: str) -> str:
    if re.fullmatch(SWEEP_KEY, key):
        return key
    name = key.removeprefix("env.")
    if types.RESERVED_NAMES.fullmatch(name):
        raise ValueError(f"{name!r} is set by torchrun, the scheduler or the toolkit; leave it out")
    raise ValueError(
        f"{key!r} cannot vary: the points of a sweep are one job array with one set of resources "
        "and options; write --OPTION for an argument or env.NAME for a variable, and submit the "
        "job once per value of anything else"
    )


def _text(value: object) -> object:
    """Return a number as text; booleans and text stay as they are."""
    types.refuse_ambiguous(value)
    if value is None:
        raise ValueError('the value is missing; write "" for an empty string')
    if isinstance(value, tuple | list | dict):
        kind = "a mapping" if isinstance(value, dict) else "a list"
        raise ValueError(f"a point has one value, not {kind}; write it as the program takes it")
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _no_switch(settings: dict[str, Any]) -> dict[str, Any]:
    for key, given in settings.items():
        values = given if isinstance(given, tuple) else (given,)
        if key.startswith("env.") and any(isinstance(value, bool) for value in values):
            raise ValueError(
                f'{key}: true may be "1", "true" or "yes" to a program; write the text you mean'
            )
    return settings


Key = Annotated[types.Text, types.Checked(_check_key)]
Value = Annotated[bool | types.Text, types.Prepared(_text)]
Axes = Annotated[
    dict[Key, Annotated[tuple[Value, ...], Field(min_length=1)]], types.Checked(_no_switch)
]
Settings = Annotated[dict[Key, Value], types.Checked(_no_switch)]


class Sweep(types.FrozenModel):
    """Many runs of one job: an array on Slurm; see [sweeps](../how-to/sweeps.md)."""

    grid: Axes = Field(default={})
    """Lists of values for `--OPTION` of `args` or `env.NAME`. Every combination is a point, and the
    last key varies fastest."""

    zipped: Axes = Field(default={}, alias="zip")
    """Lists of equal length: the first point has the first value of each list, and so on."""

    listed: tuple[Settings, ...] = Field(default=(), alias="list")
    """The points themselves, each with its keys. Each point of `grid`, `zip` and `list` is combined
    with each of the others."""

    max_running: types.PositiveInt | None = None
    """How many points may run at the same time; by default no limit, on this machine as many as
    fit. On Kubernetes the quota of the queue decides instead."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        grid, zipped, listed = (given.get(key) for key in ("grid", "zipped", "listed"))
        if not (isinstance(grid, dict) and isinstance(zipped, dict) and isinstance(listed, tuple)):
            return []
        if not (grid or zipped or listed):
            return ["give grid, zip or list; found none of them"]
        lengths = {key: len(values) for key, values in zipped.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            return [f"the lists of zip must have equal lengths: {shown}; make them equal"]
        in_list = {key for settings in listed for key in settings}
        places = [("grid", set(grid)), ("zip", set(zipped)), ("list", in_list)]
        for (one, keys), (other, others) in itertools.combinations(places, 2):
            if twice := sorted(keys & others):
                return [f"{twice[0]} is in both {one} and {other}: keep one"]
        count = max([1, *lengths.values()]) * max(1, len(listed))
        for values in grid.values():
            count *= len(values)
        if count > MOST_POINTS:
            return [f"{count} points are more than {MOST_POINTS}; vary less at a time"]
        seen: dict[frozenset[tuple[str, str | bool]], int] = {}
        for index, settings in enumerate(_combinations(grid, zipped, listed)):
            first = seen.setdefault(frozenset(settings.items()), index)
            if first != index:
                return [f"points {first} and {index} set the same; leave one out"]
        return []


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep."""

    index: int
    """The number of the point, from 0; on Slurm that of its array task."""

    name: str
    """The name of the point and of its folder in the run directory: `0003-lr=0.01-seed=2`."""

    settings: Mapping[str, str | bool]
    """The settings, by the keys of the sweep."""

    args: tuple[types.ArgumentWord, ...]
    """All arguments of the program at this point."""

    env: Mapping[str, str]
    """Variables that are added to those of the job, or replace them."""


def expand(sweep: Sweep, args: Sequence[str]) -> tuple[Point, ...]:
    """Return the points in their order: grid outermost, then zip, then list.

    Options are set in the job's `args`.

    Raises:
        ValueError: an option cannot be set, with the reason.
    """
    combinations = list(_combinations(sweep.grid, sweep.zipped, sweep.listed))
    width = max(4, len(str(len(combinations) - 1)))
    varying = {
        key
        for key in dict.fromkeys(key for settings in combinations for key in settings)
        if len({settings.get(key) for settings in combinations}) > 1
    }
    points = []
    for index, settings in enumerate(combinations):
        argv, env = list(args), {}
        for key, value in settings.items():
            if key.startswith("--"):
                argv = _with_option(argv, key, value)
            else:
                env[key.removeprefix("env.")] = str(value)
        name = _name(f"{index:0{width}}", {k: v for k, v in settings.items() if k in varying})
        args_here = tuple(map(types.ArgumentWord, argv))
        points.append(Point(index=index, name=name, settings=settings, args=args_here, env=env))
    return tuple(points)


def _combinations(
    grid: Mapping[str, Sequence[str | bool]],
    zipped: Mapping[str, Sequence[str | bool]],
    listed: Sequence[Mapping[str, str | bool]],
) -> Iterator[dict[str, str | bool]]:
    product = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    rows = zip(*zipped.values(), strict=True) if zipped else [()]
    together = [dict(zip(zipped, values, strict=True)) for values in rows]
    for one, two, three in itertools.product(product, together, listed or [{}]):
        yield {**one, **two, **three}


def _name(number: str, settings: Mapping[str, str | bool]) -> str:
    """Return a name that is safe for a folder: letters, digits and `._=+-`.

    >>> _name("0003", {"--optim.lr": "0.01", "env.SEED": "2", "--data": "/my data/x"})
    '0003-lr=0.01-seed=2-data=my-data-x'
    """
    text = number
    for key, value in settings.items():
        short = key.lstrip("-").rpartition(".")[2].lower()
        shown = str(value).lower() if isinstance(value, bool) else value
        text += f"-{short}=" + re.sub(r"[^A-Za-z0-9._+-]+", "-", shown).strip("-.")
    return text[:NAME_LENGTH].rstrip("-.=")


def _with_option(argv: list[str], option: str, value: str | bool) -> list[str]:
    """Set an option at its last occurrence, the one that counts; else at the end of the options.

    >>> _with_option(["--lr", "1", "x"], "--lr", "2"), _with_option(["--lr=1"], "--lr", "2")
    (['--lr', '2', 'x'], ['--lr=2'])
    >>> _with_option(["x"], "--lr", "2"), _with_option(["--lr", "--fast"], "--fast", False)
    (['x', '--lr', '2'], ['--lr'])
    >>> _with_option(["--", "--lr"], "--lr", "2")
    ['--lr', '2', '--', '--lr']
    """
    if "--" in argv:  # what follows it are no options
        end = argv.index("--")
        return [*_with_option(argv[:end], option, value), *argv[end:]]
    places = [at for at, word in enumerate(argv) if word.partition("=")[0] == option]
    if isinstance(value, str):
        # `--x --y` would be two options.
        pair = [f"{option}={value}"] if value.startswith("--") else [option, value]
        if not places:
            return [*argv, *pair]
        at = places[-1]
        if "=" in argv[at]:
            return [*argv[:at], f"{option}={value}", *argv[at + 1 :]]
        return [*argv[:at], *pair, *argv[at + 1 + _followed(argv, at) :]]
    if not places:
        return [*argv, *[option] * value]
    at = places[-1]
    if "=" in argv[at] or _followed(argv, at):
        raise ValueError(
            f"{option} is true or false in the sweep, as a switch is, and args[{at}] gives it a "
            "value; take it out of args, or write values into the sweep"
        )
    return [*argv[:at], *[option] * value, *argv[at + 1 :]]


def _followed(argv: list[str], at: int) -> bool:
    """Whether a value follows the option at `at`."""
    return at + 1 < len(argv) and not argv[at + 1].startswith("--")


def leaks(sweep: Sweep) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each value that holds a secret, with the problem."""
    values: list[tuple[KeyPath, str, str | bool]] = [
        (("sweep", group, key, index), key, value)
        for group, axes in (("grid", sweep.grid), ("zip", sweep.zipped))
        for key, axis in axes.items()
        for index, value in enumerate(axis)
    ]
    values += (
        (("sweep", "list", index, key), key, value)
        for index, settings in enumerate(sweep.listed)
        for key, value in settings.items()
    )
    for path, key, value in values:
        if isinstance(value, bool):
            continue
        if key.startswith("--"):  # as in args: the option's name and its value
            kind = next((kind for _, kind in secret_scan.kinds_of_words([key, value])), None)
        else:
            kind = secret_scan.kind_of(value, name=key.removeprefix("env."))
        if kind:
            yield path, secret_scan.leak_message(dotted(path), kind)


def misread(document: Document) -> Iterator[tuple[KeyPath, str]]:
    """Yield the numbers that YAML shortens, like `3.10`, which becomes 3.1."""
    for path, written in document.written.items():
        value: Any = document.data
        for part in path if path[:1] == ("sweep",) else ():
            value = value[part]
        if isinstance(value, int | float) and not isinstance(value, bool) and str(value) != written:
            yield path, f'{written} is read as {value}; write "{written}" if you mean the text'
