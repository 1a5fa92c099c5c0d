"""Users' patches of rendered objects: JSON Patch, and Kubernetes' strategic merge patch.

Pure. A server supports strategic merge only for its own kinds; here it works for all kinds.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.errors import RenderError
from toolkit.job.kubernetes_options import Patch
from toolkit.rendering.environment import json_quote, yaml_block
from toolkit.text.yaml_reader import documents_of

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "port"),
    "replicatedJobs": ("name",),
    "resourceClaims": ("name",),
    "runtimePatches": ("manager",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists with a merge key (Kubernetes API, `patch-merge-key`; `x-kubernetes-list-map-keys` of JobSet
and TrainJob). All other lists are replaced as a whole."""


class _Unfit(Exception):
    """A patch does not apply; the message names the location and the value."""


def patched(text: str, patches: Iterable[tuple[str, str, Patch]]) -> str:
    """Return a rendered manifest with patches applied; only the comments of its head remain.

    Args:
        text: The manifest, a stream of documents.
        patches: Patches, each with its location, like `profile 'k8s': patches[0]`, and the kind
            of the patched objects.

    Raises:
        RenderError: a patch does not apply; the message has the reason.
    """
    documents = documents_of(text)
    for place, kind, patch in patches:
        targets = [at for at, document in enumerate(documents) if document["kind"] == kind]
        if not targets:
            kinds = ", ".join(dict.fromkeys(document["kind"] for document in documents))
            raise RenderError(f"no {kind} is rendered; there are {kinds}", place=place)
        for at in targets:
            try:
                if patch.merge is None:
                    changed = _operated(documents[at], _thawed(patch.json_patch))
                else:
                    changed = _merged_mapping(documents[at], _thawed(patch.merge), "")
            except _Unfit as error:
                raise RenderError(str(error), place=place) from None
            if _identity(changed) != _identity(documents[at]):
                raise RenderError(
                    "apiVersion, kind, name and namespace are how the run is found again; they "
                    "follow from the job and the profile",
                    place=place,
                )
            documents[at] = changed
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    blocks = (
        "---" + "".join(f"\n{key}:{yaml_block(value, 2)}" for key, value in document.items())
        for document in documents
    )
    return "\n".join([*head, *blocks]) + "\n"


def _identity(document: Mapping[str, Any]) -> tuple[Any, ...]:
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    return (
        *(document.get(key) for key in ("apiVersion", "kind")),
        *(metadata.get(key) for key in ("name", "namespace")),
    )


def _operated(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Apply the operations of a JSON Patch, one after the other."""
    try:
        import jsonpatch
        from jsonpointer import JsonPointerException
    except ImportError:
        raise _Unfit(
            "json needs the package jsonpatch: pip install jsonpatch, or write the change as merge"
        ) from None
    for at, operation in enumerate(operations):
        try:
            document = jsonpatch.JsonPatch([operation]).apply(document)
        except (jsonpatch.JsonPatchException, JsonPointerException, TypeError) as error:
            message = re.sub(r" in \{.*", "", str(error), flags=re.DOTALL)  # the whole object
            raise _Unfit(f"json[{at}] {json_quote(operation)} does not apply: {message}") from None
    if not isinstance(document, dict):
        raise _Unfit("json: nothing of the object is left")
    return document


def _merged(old: Any, patch: Any, path: str) -> Any:
    if isinstance(old, dict) and isinstance(patch, dict):
        return _merged_mapping(old, patch, path)
    if isinstance(old, list) and isinstance(patch, list):
        return _merged_list(old, patch, path)
    if isinstance(old, dict | list) or isinstance(patch, dict | list):
        verb = "join" if isinstance(patch, dict | list) else "replace"
        raise _Unfit(f"merge: {path} is {_kind(old)}, which {json_quote(patch)} cannot {verb}")
    return patch


def _merged_mapping(old: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    patch = dict(patch)
    directive, retained = patch.pop("$patch", None), patch.pop("$retainKeys", None)
    _require_directive(directive, path)
    if directive == "replace":
        replaced: dict[str, Any] = _added(patch, path)
        return replaced
    merged = dict(old)
    for key, value in patch.items():
        below = f"{path}.{key}".lstrip(".")
        if key.startswith("$"):
            raise _Unfit(f"merge: {below}: the toolkit knows $patch and $retainKeys")
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            merged.pop(key, None)
        elif key in merged:
            merged[key] = _merged(merged[key], value, below)
        else:
            merged[key] = _added(value, below)
    return merged if retained is None else {key: merged[key] for key in merged if key in retained}


def _merged_list(old: list[Any], patch: list[Any], path: str) -> list[Any]:
    named = [entry for entry in (*old, *patch) if isinstance(entry, dict)]
    keys = MERGE_KEYS.get(path.rpartition(".")[2], ())
    merge_key = next((key for key in keys if any(key in entry for entry in named)), None)
    rest = [entry for entry in patch if entry != {"$patch": "replace"}]
    if merge_key is None or len(rest) < len(patch):
        replaced: list[Any] = _added(rest, path)
        return replaced
    merged = list(old)
    for entry in rest:
        if not isinstance(entry, dict) or merge_key not in entry:
            raise _Unfit(f"merge: {path}: an entry needs its {merge_key}: {json_quote(entry)}")
        name = entry[merge_key]
        below = f"{path}[{name}]"
        same = [at for at, one in enumerate(merged) if one.get(merge_key) == name]
        if entry.get("$patch") == "delete":
            if not same:
                names = ", ".join(str(one.get(merge_key)) for one in merged)
                raise _Unfit(f"merge: {below} is not there to be deleted; there are {names}")
            del merged[same[0]]
        elif same:
            merged[same[0]] = _merged_mapping(merged[same[0]], entry, below)
        else:
            merged.append(_added(entry, below))
    return merged


def _added(value: Any, path: str) -> Any:
    """Return a patch's value without a target, stripped of nulls and directives."""
    if isinstance(value, dict):
        _require_directive(value.get("$patch"), path)
        return {
            key: _added(entry, f"{path}.{key}")
            for key, entry in value.items()
            if entry is not None and key not in ("$patch", "$retainKeys")
        }
    return [_added(item, path) for item in value] if isinstance(value, list) else value


def _require_directive(directive: Any, path: str) -> None:
    if directive not in ("replace", "merge", None):
        raise _Unfit(f"merge: {path}: $patch is {json_quote(directive)}; write replace or delete")


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else json_quote(value)


def _thawed(value: Any) -> Any:
    """Return a value with mutable mappings and lists."""
    if isinstance(value, Mapping):
        return {key: _thawed(entry) for key, entry in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, list | tuple) else value
