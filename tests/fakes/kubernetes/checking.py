"""The form of objects: schemas of CRDs, and the client's models of the core kinds.

Only the form is checked here. `admission` checks some of the enums, names and quantities.
"""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

from tests.fakes.kubernetes.resources import Resource
from tests.fakes.kubernetes.wire import Object, Refusal, Request

__all__ = ["checked", "unknown_fields"]

_FOLDER = Path(__file__).parent / "schemas"
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


@functools.cache
def _schema(plural: str) -> Any:
    file = _FOLDER / f"{plural}.json"
    return json.loads(file.read_text()) if file.exists() else None


def checked(store: object, resource: Resource, body: Object, request: Request) -> Object:
    """Return an object as the server keeps it: unknown fields gone, the CRD's defaults added.

    Raises:
        Refusal: a field is wrong; or unknown, with `fieldValidation=Strict`.
    """
    body, unknown, wrong = _read(resource, body)
    level = request.query.get("fieldValidation") or "Warn"
    if unknown and level == "Strict" and request.method == "PATCH":
        # Server-side apply fails before validation, with 500 (seen on 1.34.9).
        metadata = body["metadata"]
        thing = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
        thing += f"; {body['apiVersion']}, Kind={body['kind']}"
        words = f"failed to create typed patch object ({thing}): "
        words += ", ".join(f".{path}: field not declared in schema" for path in unknown)
        raise Refusal(500, "InternalError", words)
    if unknown and level == "Strict":
        words = ", ".join(f'unknown field "{path}"' for path in unknown)
        prefix = ""
        if not resource.crd:
            version = resource.versions[0]
            prefix = f'{resource.kind} in version "{version}" cannot be handled as a '
            prefix += f"{resource.kind}: "
        raise Refusal(400, "BadRequest", f"{prefix}strict decoding error: {words}")
    if level == "Warn":
        request.warnings += [f'unknown field "{path}"' for path in unknown]
    if wrong:
        name = body["metadata"].get("name", "")
        if resource.crd:
            words = wrong[0] if len(wrong) == 1 else f"[{', '.join(wrong)}]"
            full = f"{resource.kind}.{resource.group}"
            raise Refusal(422, "Invalid", f'{full} "{name}" is invalid: {words}')
        words = f'{resource.kind} in version "{resource.versions[0]}" cannot be handled as a '
        raise Refusal(400, "BadRequest", f"{words}{resource.kind}: json: {wrong[0]}")
    return body


def unknown_fields(resource: Resource, body: Object) -> list[str]:
    """Return the fields that the server does not know."""
    return _read(resource, body)[1]


def _read(resource: Resource, body: Object) -> tuple[Object, list[str], list[str]]:
    if resource.crd:
        schema = _schema(resource.plural)
        if schema is None or resource.plural == "podgroups":
            return body, [], []
        reader = _Reader(schema)
        kept = {k: body[k] for k in ("apiVersion", "kind", "metadata") if k in body}
        rest = reader.read({k: v for k, v in body.items() if k not in kept}, schema, "")
        return kept | rest, reader.unknown, reader.wrong
    return _read_core(resource, body)


class _Reader:
    """Reads a value by a structural schema (Kubernetes, CustomResourceDefinition)."""

    def __init__(self, schema: Any) -> None:
        self._parts = schema["$defs"]
        self.unknown: list[str] = []
        self.wrong: list[str] = []

    def read(self, value: Any, schema: Any, path: str) -> Any:
        """Return a value without unknown fields and with defaults."""
        if "$ref" in schema:
            schema = self._parts[schema["$ref"].removeprefix("#/$defs/")]
        if schema.get("x-kubernetes-int-or-string"):
            if not isinstance(value, int | str) or isinstance(value, bool):
                self._refuse(path, value, "must be of type int or string")
            return value
        kind = schema.get("type")
        if value is None and (schema.get("nullable") or not path):
            return value
        right = _TYPES.get(kind, object)
        if not isinstance(value, right) or (isinstance(value, bool) and kind != "boolean"):
            got = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
            given = next((word for type_, word in got.items() if isinstance(value, type_)), "null")
            shown = f'"{given}"'
            self.wrong.append(
                f"{path}: Invalid value: {shown}: {path} in body must be of type {kind}: {shown}"
            )
            return value
        if isinstance(value, dict):
            return self._object(value, schema, path)
        if isinstance(value, list):
            return self._array(value, schema, path)
        self._scalar(value, schema, path)
        return value

    def _object(self, value: Object, schema: Any, path: str) -> Object:
        known, extra = schema.get("properties", {}), schema.get("additionalProperties")
        loose = schema.get("x-kubernetes-preserve-unknown-fields") or extra is True
        result: Object = {}
        for key, inner in value.items():
            here = f"{path}.{key}" if path else key
            if key in known:
                nothing = inner is None and not self._is_nullable(known[key])
                if not nothing:  # null is dropped, as if the field were absent
                    result[key] = self.read(inner, known[key], here)
            elif isinstance(extra, dict):
                result[key] = self.read(inner, extra, f"{path}[{key}]")
            elif loose or (not known and extra is None and not path):
                result[key] = copy.deepcopy(inner)
            else:
                self.unknown.append(here)
        for key, inner in known.items():
            plain = self._plain(inner)
            if key not in result and "default" in plain:
                result[key] = copy.deepcopy(plain["default"])
        for key in schema.get("required", ()):
            if key not in result:
                self.wrong.append(
                    f"{path}.{key}: Required value" if path else f"{key}: Required value"
                )
        return result

    def _array(self, value: list[Any], schema: Any, path: str) -> list[Any]:
        items = schema.get("items", {})
        result = [self.read(one, items, f"{path}[{i}]") for i, one in enumerate(value)]
        kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys")
        for index, one in enumerate(result):
            if kind == "map" and isinstance(one, dict):
                same = [all(o.get(k) == one.get(k) for k in keys) for o in result[:index]]
                shown: Any = {k: one.get(k) for k in keys}
            elif kind == "set":
                same, shown = [o == one for o in result[:index]], one
            else:
                continue
            if any(same):
                text = json.dumps(shown, separators=(",", ":"))
                self.wrong.append(f"{path}[{index}]: Duplicate value: {text}")
        if len(result) > schema.get("maxItems", len(result)):
            self.wrong.append(f"{path}: Too many: {len(result)}")
        if len(result) < schema.get("minItems", 0):
            self.wrong.append(f"{path}: Invalid value: should have at least {schema['minItems']}")
        return result

    def _scalar(self, value: Any, schema: Any, path: str) -> None:
        if "enum" in schema and value not in schema["enum"]:
            words = ", ".join(f'"{one}"' for one in schema["enum"])
            self.wrong.append(f'{path}: Unsupported value: "{value}": supported values: {words}')
        if isinstance(value, str):
            pattern = schema.get("pattern")
            if pattern and not re.search(pattern, value):
                self._refuse(path, value, f"should match '{pattern}'")
            if len(value) > schema.get("maxLength", len(value)):
                self._refuse(path, value, f"may not be more than {schema['maxLength']} bytes")
            if len(value) < schema.get("minLength", 0):
                self._refuse(path, value, f"should be at least {schema['minLength']} chars long")
        elif not isinstance(value, bool):
            if value < schema.get("minimum", value):
                self._refuse(path, value, f"should be greater than or equal to {schema['minimum']}")
            if value > schema.get("maximum", value):
                self._refuse(path, value, f"should be less than or equal to {schema['maximum']}")

    def _refuse(self, path: str, value: Any, why: str) -> None:
        self.wrong.append(f"{path}: Invalid value: {json.dumps(value)}: {path} in body {why}")

    def _plain(self, schema: Any) -> Any:
        if "$ref" in schema:
            return self._parts[schema["$ref"].removeprefix("#/$defs/")]
        return schema

    def _is_nullable(self, schema: Any) -> bool:
        return bool(self._plain(schema).get("nullable"))


def _read_core(resource: Resource, body: Object) -> tuple[Object, list[str], list[str]]:
    from pydantic import ValidationError

    from kubernetes import client

    model: Any = getattr(client, resource.model or "", None)
    if not hasattr(model, "model_validate"):  # before client 37
        return body, [], []
    try:
        model.model_validate(_for_model(body))
    except ValidationError as error:
        unknown, wrong = [], []
        body = copy.deepcopy(body)
        for one in error.errors():
            path = [step for step in one["loc"] if not str(step).startswith("function-")]
            text = _dotted(path)
            if one["type"] == "extra_forbidden":
                unknown.append(text)
                _forget(body, path)
            elif resource.kind not in ("Event",):
                wrong.append(f"cannot unmarshal {one['input']!r} into field {text}: {one['msg']}")
        return body, unknown, wrong
    return body, [], []


def _for_model(value: Any) -> Any:
    """Return a value as the client's models take it: null means absent, and quantities are
    strings."""
    if isinstance(value, dict):
        quantities = {"requests", "limits", "capacity", "hard"}
        found = {k: _for_model(v) for k, v in value.items() if v is not None}
        for key in quantities & set(found):
            if isinstance(found[key], dict):
                found[key] = {
                    k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v
                    for k, v in found[key].items()
                }
        return found
    return [_for_model(one) for one in value] if isinstance(value, list) else value


def _dotted(path: list[Any]) -> str:
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path)
    return text.removeprefix(".")


def _forget(body: Any, path: list[Any]) -> None:
    for one in path[:-1]:
        try:
            body = body[one]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(body, dict):
        body.pop(path[-1], None)
