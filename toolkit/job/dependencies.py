"""The runs that a job waits for, and how each of them must end. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any

from toolkit.errors import InputError
from toolkit.job.loader import FrozenModel, Prepared, Text
from toolkit.text.yaml_reader import Ambiguous

__all__ = ["After", "Dependency", "after_schema", "parse_dependency"]

WISHES = ("ok", "any", "fail")
"""How another run must end: with success, in any way, or with a failure."""


class Dependency(FrozenModel):
    """A run to wait for, by its URI, name or run directory, under one of the three keys."""

    ok: Text | None = None
    """The run must succeed; if it fails, this job is cancelled. A run without a key means this."""

    any: Text | None = None
    """The run must end."""

    fail: Text | None = None
    """The run must fail; if it succeeds, this job is cancelled."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        there = [wish for wish in WISHES if given.get(wish) is not None]
        if len(there) != 1:
            return [f"give one of ok, any and fail; found {' and '.join(there) or 'none'}"]
        return [] if given[there[0]] else [f"{there[0]}: the run has no name"]

    @property
    def wish(self) -> str:
        """The required end: ok, any or fail."""
        return next(wish for wish in WISHES if getattr(self, wish) is not None)

    @property
    def run(self) -> str:
        """The run's URI, name or run directory."""
        return str(getattr(self, self.wish))


def _by_name(value: object) -> object:
    if isinstance(value, Ambiguous):
        raise ValueError(value.reason)
    return {"ok": value} if isinstance(value, str) else value


After = tuple[Annotated[Dependency, Prepared(_by_name)], ...]
"""Runs to wait for, all of them."""


def parse_dependency(text: str) -> Dependency:
    """Read `RUN[:ok|any|fail]`, as `toolkit submit --after` takes it.

    Raises:
        InputError: the text names no run.

    >>> parse_dependency("slurm://c/7:any").any, parse_dependency("slurm://c/7").ok
    ('slurm://c/7', 'slurm://c/7')
    """
    run, _, wish = text.rpartition(":")
    if wish not in WISHES:
        run, wish = text, "ok"
    if not run:
        raise InputError(f"--after {text}: names no run; write it like slurm://CLUSTER/1234:any")
    return Dependency.model_validate({wish: run})


def after_schema() -> dict[str, Any]:
    """Return the JSON Schema of `after`."""
    name = {"type": "string", "minLength": 1}
    one = {
        "type": "object",
        "additionalProperties": False,
        "properties": {wish: {"anyOf": [name, {"type": "null"}]} for wish in WISHES},
        "oneOf": [
            {"required": [wish], "properties": {wish: {"type": "string"}}} for wish in WISHES
        ],
    }
    return {"type": "array", "items": {"anyOf": [name, one]}, "default": []}
