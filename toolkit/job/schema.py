"""The JSON Schema of the job file, and the docstrings of fields that it shows."""

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from toolkit.job.sbatch_options import ALLOWED, FLAGS, OPTIONAL, VALUED
from toolkit.job.spec import WISHES, JobSpec
from toolkit.job.sweep import SWEEP_KEY
from toolkit.job.types import ENV_NAME, RESERVED_NAMES, VERSION, FrozenModel

_NAMES = {"type": "string", "pattern": f"^(?!(?:{RESERVED_NAMES.pattern})$){ENV_NAME}$"}
"""The schema of names of variables."""


def head_of(name: str) -> dict[str, str]:
    """Return the first keys of a schema: the dialect, and its own identity with the version."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:torch-deploy-toolkit:schema:{name}:{VERSION}",
    }


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job file; descriptions are the docstrings of the fields."""
    schema = {**head_of("job"), **JobSpec.model_json_schema(by_alias=True)}
    place = {"anyOf": [{"$ref": "#/$defs/Secret"}, {"type": "null"}]}
    schema["properties"] |= {
        "env": env_schema(),
        "secrets": {
            "anyOf": [
                {"type": "array", "items": _NAMES, "uniqueItems": True},
                {"type": "object", "propertyNames": _NAMES, "additionalProperties": place},
            ],
            "default": {},
        },
        "sbatch": sbatch_schema(),
        "after": _after_schema(),
    }
    schema["$defs"]["Sweep"]["properties"] |= _sweep_schema()
    schema["$defs"]["Sweep"]["anyOf"] = [
        {"required": [key], "properties": {key: {smallest: 1}}}
        for key, smallest in (
            ("grid", "minProperties"),
            ("zip", "minProperties"),
            ("list", "minItems"),
        )
    ]
    schema["$defs"].pop("Dependency", None)
    schema["$defs"]["Secret"]["oneOf"] = [
        {
            "required": list(needed),
            "properties": {key: {"not": {"type": "null"}} for key in needed}
            | {key: {"type": "null"} for key in left_out},
        }
        for needed, left_out in ((("secret", "key"), ("file",)), (("file",), ("secret", "key")))
    ]
    describe({"JobSpec": schema, **schema["$defs"]})
    schema["oneOf"] = [
        {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
        for key in ("module", "script", "command")
    ]
    return schema


def describe(parts: Mapping[str, Any]) -> None:
    """Add the docstrings of the fields to the schemas of our models, by the models' names."""
    models = {m.__name__: m for m in _below(FrozenModel) if m.__module__.startswith("toolkit.")}
    for model_name, part in parts.items():
        model = models[model_name]
        owners = [owner for owner in model.__mro__ if owner in models.values()]
        for owner in reversed(owners):
            for name, text in field_docstrings(owner).items():
                alias = model.model_fields[name].alias or name
                # A description beside a $ref does not replace that of the reference.
                part["properties"][alias]["description"] = text
                part["properties"][alias].pop("title", None)


def _below(model: type[FrozenModel]) -> Iterator[type[FrozenModel]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _below(inner)


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Read the string below each field from the source; pydantic would do it at every import."""
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    docstrings = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docstrings[field.target.id] = inspect.cleandoc(str(below.value.value))
    return docstrings


def env_schema() -> dict[str, Any]:
    """Return the schema of a mapping of variables to their values."""
    return {
        "type": "object",
        "propertyNames": _NAMES,
        "additionalProperties": {"type": "string"},
        "default": {},
    }


def sbatch_schema() -> dict[str, Any]:
    """Return the schema of more options of sbatch."""
    text = {"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]+$"}
    gres = {**text, "not": {"pattern": "(^|,)(gres[/:])?gpu(:|=|,|$)"}}
    number, flag, nothing = {"type": "integer"}, {"const": True}, {"type": "null"}
    kinds: list[tuple[Iterable[str], list[dict[str, Any]]]] = [
        (FLAGS, [flag]),
        (OPTIONAL, [flag, number, text]),
        (VALUED - {"gres"}, [number, text]),
        (["gres"], [number, gres]),
    ]
    return {
        "type": "object",
        "propertyNames": {"enum": sorted(ALLOWED)},
        "patternProperties": {
            f"^({'|'.join(sorted(names))})$": {"anyOf": [*choices, nothing]}
            for names, choices in kinds
        },
        "default": {},
    }


def _sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of the keys, which pydantic leaves out."""
    switch, text, number = {"type": "boolean"}, {"type": "string"}, {"type": "number"}
    kinds = {"^--": {"anyOf": [text, number, switch]}, "^env\\.": {"anyOf": [text, number]}}
    names = {"type": "string", "pattern": f"^(?:{SWEEP_KEY})$"}
    axes = {
        "type": "object",
        "propertyNames": names,
        "patternProperties": {
            begin: {"type": "array", "items": value, "minItems": 1}
            for begin, value in kinds.items()
        },
    }
    settings = {"type": "object", "propertyNames": names, "patternProperties": kinds}
    return {
        "grid": {**axes, "default": {}},
        "zip": {**axes, "default": {}},
        "list": {"type": "array", "items": settings, "default": []},
    }


def _after_schema() -> dict[str, Any]:
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
