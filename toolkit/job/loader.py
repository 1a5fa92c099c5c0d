"""Turns a document into a model: applies overrides, and reports every problem with its place."""

import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from toolkit.errors import InputError, Problem, did_you_mean
from toolkit.job.types import VERSION, FrozenModel, is_finite_number, newer_than_known
from toolkit.text.quantities import whole_number
from toolkit.text.secret_scan import conceal, is_telling
from toolkit.text.yaml_reader import Ambiguous, Document, KeyPath, dotted, read_document

Model = TypeVar("Model", bound=FrozenModel)


def override(document: Document, assignments: Iterable[str], model: type[BaseModel]) -> Document:
    """Return the document with `KEY.KEY=VALUE` assignments applied.

    If the key's type in `model` is a string, the value is taken literally, else read as YAML.
    """
    data, problems = document.data, list(document.problems)
    places, written = dict(document.places), dict(document.written)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        path = _path(name)
        place = f"--set {name}{equals}{conceal(text, [text] if _is_secret(path) else [])}"
        if not equals or not all(name.split(".")):
            problems.append(Problem(place=place, message="write it like resources.nnodes=4"))
            continue
        if len(path) > _MAX_DEPTH:
            problems.append(Problem(place=place, message=f"no key is {len(path)} levels deep"))
            continue
        types = _options(_annotation(model, path))
        try:
            if str in types and bool not in types:
                value = Document(data=text, source=place)
            else:
                value = read_document(text, place)
            data = _assign(data, path, value.data)
        except InputError as error:
            problems += error.problems
            continue
        except (TypeError, IndexError):
            message = f"there is no {name!r} to set in {document.source}"
            problems.append(Problem(place=place, message=message))
            continue
        problems += value.problems
        places = {key: at for key, at in places.items() if key[: len(path)] != path}
        written = {key: shown for key, shown in written.items() if key[: len(path)] != path}
        for length in range(1, len(path)):
            places.setdefault(path[:length], place)
        places[path] = place
        written |= {(*path, *below): shown for below, shown in value.written.items()}
    return replace(document, data=data, places=places, written=written, problems=tuple(problems))


_MAX_DEPTH = 50
_INDEX = re.compile(r"[0-9]{1,9}")


def _path(name: str) -> KeyPath:
    """Split `KEY.0.KEY` into keys and list positions."""
    return tuple(int(part) if _INDEX.fullmatch(part) else part for part in name.split("."))


def assign(document: Document, changes: Mapping[str, Any]) -> Document:
    """Return the document with `KEY.KEY` set to Python values; None removes a key."""
    data, problems, written = document.data, list(document.problems), dict(document.written)
    for name, value in changes.items():
        path = _path(name)
        written = {key: shown for key, shown in written.items() if key[: len(path)] != path}
        try:
            data = _assign(data, path, _REMOVED if value is None else frozen(value))
        except (TypeError, IndexError):
            problems.append(Problem(place=document.source, message=f"there is no {name!r} to set"))
    return replace(document, data=data, written=written, problems=tuple(problems))


def frozen(value: Any) -> Any:
    """Return a value as in a document: models as mappings of set fields, lists as tuples."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return value


_REMOVED = object()
"""The value that removes a key."""


def _assign(data: Any, path: KeyPath, value: Any) -> Any:
    """Return `data` with `value` at `path`; missing mappings are created, missing items are not."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(data, tuple) and isinstance(key, int):
        items = list(data)
        items[key] = _assign(items[key], rest, value)
        return tuple(items)
    if isinstance(data, dict | None) and isinstance(key, str):
        entries = dict(data or {})
        if value is _REMOVED and not rest:
            return {other: item for other, item in entries.items() if other != key}
        return entries | {key: _assign(entries.get(key), rest, value)}
    raise TypeError


def validate(model: type[Model], document: Document, error_type: type[InputError]) -> Model:
    """Return the model that the document describes.

    Raises:
        InputError: of `error_type`, with every problem of the document.
    """
    refuse_newer(document, error_type)
    problems = list(document.problems)
    if not isinstance(document.data, dict):
        kind = "is empty" if document.data is None else "is not a mapping of keys to values"
        raise error_type([Problem(place=document.place(()), message=f"the file {kind}"), *problems])
    data = _with_numbers_as_text(document) if "args" in model.model_fields else document.data
    try:
        instance = model.model_validate(data)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if not details["loc"]:
                continue
            path: KeyPath = tuple(part for part in details["loc"] if part not in _NOT_WRITTEN)
            written = document.written.get(path)
            message = _message(model, path, details, written)
            is_value = "[key]" not in details["loc"] and _is_secret(path)
            hidden = [written or "", str(details["input"])] if is_value else []
            problems.append(Problem(place=document.place(path), message=conceal(message, hidden)))
        # pydantic validates a model as a whole only if all fields are valid, so it is done here.
        problems += (
            Problem(place=document.place(()), message=message)
            for message in model.contradictions(data)
        )
    else:
        if not problems:
            return instance

    def by_line(problem: Problem) -> tuple[str, int]:
        source, _, line = (problem.place or "").rpartition(":")
        number = whole_number(line)
        return (problem.place or "", 0) if number is None else (source, number)

    raise error_type(sorted(problems, key=by_line))


_NUMBER = re.compile(r"[-+]?([1-9][0-9]*|[0-9]?)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""A number that is written alike in all versions of YAML, or is a string to one: 1e-3."""


def _with_numbers_as_text(document: Document) -> dict[str, Any]:
    """Return the data of a job with the numbers in `args` as they are written.

    Words that are another number, or no number, to a version of YAML are left for the model to
    refuse.
    """
    data: dict[str, Any] = document.data
    if not isinstance(args := data.get("args"), tuple):
        return data
    words = list(args)
    for place, word in enumerate(words):
        if isinstance(word, Ambiguous) and word and _NUMBER.fullmatch(word):
            words[place] = str(word)
        elif is_finite_number(word):
            words[place] = document.written.get(("args", place), word)
    return {**data, "args": tuple(words)}


def refuse_newer(document: Document, error_type: type[InputError]) -> None:
    """Refuse a document of a newer format: its other keys may have any meaning.

    Raises:
        InputError: of `error_type`, with the version as the only problem.
    """
    version = document.data.get("version") if isinstance(document.data, dict) else None
    if isinstance(version, int) and version > VERSION:
        message = f"version: {newer_than_known(version)}"
        raise error_type([Problem(place=document.place(("version",)), message=message)])


_NOT_WRITTEN = ("[key]", "[count]", "[range]")
"""Parts of pydantic's locations that no file holds: a mapping's key, a union's alternative."""


def _is_secret(path: KeyPath) -> bool:
    """Whether the value at a path may be a secret that was written into the file."""
    if len(path) != 2:
        return False
    return path[0] == "secrets" or (path[0] == "env" and is_telling(str(path[1])))


_RESOURCES = {
    **{word: "gpus_per_node" for word in ("gpu", "gpus", "num_gpus", "gres")},
    **{word: "nnodes" for word in ("nodes", "num_nodes", "replicas")},
    **{word: "cpus_per_node" for word in ("cpu", "cpus", "cpus_per_task", "num_cpus")},
    **{word: "nproc_per_node" for word in ("ntasks", "ntasks_per_node", "nproc", "num_processes")},
    "mem": "memory",
}
"""Words of sbatch and other tools: the key of `resources`."""

_OF_A_SITE = ("account", "namespace", "partition", "qos", "queue", "venv", "modules", "runs_dir")


def _of_schedulers(model: type[BaseModel], path: KeyPath) -> str:
    """Return where a job file has what an unknown key means elsewhere; "" if that is unknown."""
    word = str(path[-1]).replace("-", "_")
    inside = path[:-1] == ("resources",)
    if "sweep" not in model.model_fields or not (inside or len(path) == 1):  # no job
        return ""
    if word in ("time", "walltime", "timeout"):
        return "write time_limit: …" + (" beside 'resources'" if inside else "")
    if word in _OF_A_SITE:
        return "write it in a profile, which `toolkit init` makes and `--to` names"
    (resources,) = (m for m in _options(_annotation(model, ("resources",))) if _is_model(m))
    key = _RESOURCES.get(word, word)
    if key not in _keys(resources):
        return ""
    return f"did you mean {key!r}?" if inside else f"write resources: {{{key}: …}}"


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_model(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _message(model: type[BaseModel], path: KeyPath, error: Any, written: str | None) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    name = dotted(path)
    if kind == "extra_forbidden":
        where = f" under {dotted(path[:-1])!r}" if path[:-1] else ""
        parents = _options(_annotation(model, path[:-1]) or model)
        models = filter(_is_model, parents)
        known = next((_keys(m) for m in models), [])
        way_out = _of_schedulers(model, path) or did_you_mean(path[-1], known)
        return f"unknown key {str(path[-1])!r}{where}; {way_out}"
    if kind == "missing":
        return f"the key {name!r} is missing"
    if kind == "value_error":
        return f"{name}: {context['error']}" if name else str(context["error"])
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{name}: {value!r} is not a choice; {did_you_mean(value, choices)}"
    if kind == "string_type":
        if value is None and not written:
            return f'{name}: the value is missing; write "" for an empty string'
        if written is not None:
            return f'{name}: {written} is not a string to YAML; write "{written}"'
    if kind == "too_short":
        return f"{name}: the list is empty"
    if kind == "greater_than_equal":
        return f"{name}: must be at least {context['ge']:g}, not {written or value}"
    match value:
        case None:
            shown = "nothing"
        case dict():
            shown = "a mapping"
        case tuple():
            shown = "a list"
        case _:
            shown = repr(value)
    if kind not in _EXPECTED:
        return f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}, not {shown}"
    if isinstance(value, Ambiguous):
        return f"{name}: must be {_EXPECTED[kind]}; {value.reading}"
    listed = kind == "tuple_type" and path[-1] in ("args", "command")
    example = f"; write a list: {path[-1]}: [{_WORDS[str(path[-1])]}]" if listed else ""
    return f"{name}: must be {_EXPECTED[kind]}, not {written or shown}{example}"


_WORDS = {"args": '--lr, "0.1"', "command": "python, -m, package"}
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "a mapping of keys to values",
    "quantity_type": "a string with a unit",
    "secrets_type": "a list of names, or a mapping of names to places",
    "string_type": "a string",
    "tuple_type": "a list",
}


def _annotation(root: Any, path: KeyPath) -> Any:
    """Return the type at `path`; None if the model has no such key."""
    annotation: Any = root
    for part in path:
        for option in _options(annotation):
            if isinstance(option, type) and issubclass(option, BaseModel):
                fields = {f.alias or name: f.annotation for name, f in option.model_fields.items()}
                annotation = fields.get(str(part))
                break
            if get_origin(option) in (dict, tuple):
                annotation = get_args(option)[1 if get_origin(option) is dict else 0]
                break
        else:
            return None
    return annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, without None and without annotations."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(
            option for a in get_args(annotation) for option in _options(a) if a is not type(None)
        )
    return (annotation,)
