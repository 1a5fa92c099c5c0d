"""The reference pages of the job file and the profiles, written from the fields' docstrings."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolkit import profile, spec
from toolkit.quantities import format_duration
from toolkit.validation import FrozenModel

JOB = (spec.JobSpec, spec.Resources, spec.Stop, spec.Retries, spec.Mount, spec.Secret)
PROFILES = (
    profile.LocalProfile,
    profile.SlurmProfile,
    profile.KubernetesProfile,
    profile.NodeFacts,
)


def page(title: str, source: str, models: tuple[type[FrozenModel], ...]) -> str:
    """Return a page with a table for each model."""
    parts = [f"# {title}", f"Written by `make golden` from the docstrings in `{source}`."]
    for model in models:
        summary = (model.__doc__ or "").strip()
        parts += [f"## {model.__name__}", summary, "\n".join(_table(model))]
    return "\n\n".join(parts) + "\n"


def _table(model: type[FrozenModel]) -> Iterator[str]:
    yield "| key | what it takes | default | |"
    yield "|---|---|---|---|"
    documented: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, FrozenModel) and owner is not FrozenModel:
            documented |= spec.field_docstrings(owner)
    for name, field in model.model_fields.items():
        key = field.alias or name
        text = documented[name].replace("|", "\\|").replace("\n", " ")
        yield f"| `{key}` | {_kind(name, field.annotation)} | {_default(name, field)} | {text} |"


def _kind(name: str, annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(name, arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(name, a) for a in arguments if a is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_kind(name, arguments[0])}"
    if origin is dict:
        return f"mapping to {_kind(name, arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if annotation is int:
        return "time" if name.endswith("_s") else "size" if name.endswith("_bytes") else "number"
    return {bool: "true or false", str: "string"}[annotation]


def _default(name: str, field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "required"
    if field.default in (None, (), {}, ""):
        return ""
    shown = format_duration(field.default) if name.endswith("_s") else field.default
    return f"`{str(shown).lower() if isinstance(shown, bool) else shown}`"


PAGES = {
    "docs/reference/job-file.md": page("The job file", "toolkit/spec.py", JOB),
    "docs/reference/profiles.md": page("Profiles", "toolkit/profile.py", PROFILES),
}
"""Reference page: what it must hold."""
