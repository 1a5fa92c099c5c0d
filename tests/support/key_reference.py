"""The reference pages of the job file and the profiles: each key with an example and its effect.

The effect is found, not described: the example is rendered for a Slurm cluster and for a
namespace of Kubernetes, with the key and without it, and the page shows the lines that differ.
"""

import difflib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

import toolkit
from toolkit.job import schema
from toolkit.job.types import FrozenModel

EXAMPLES = Path(__file__).parents[1] / "data/reference"

INTRODUCTION = (
    "What a key changes is shown by its example: at most six lines of the batch script and of the "
    "Kubernetes manifest that are there because of it (`…` stands for a checksum or for more "
    "lines). A key without such lines holds other keys, is for the toolkit itself, or changes the "
    "text as a whole. Written by `make golden`, from the docstrings and from rendered examples."
)

LINES = 6
"""The most lines that are shown of a key's effect."""

JOB = {"name": "train", "script": "train.py", "image": "registry.example.org/train:1"}
NODES = {"resources": {"nnodes": 2, "nproc_per_node": 8, "gpus_per_node": 8, "memory": "480GiB"}}
SITES: dict[str, dict[str, Any]] = {
    "slurm": {"kind": "slurm", "supervisor": "installed"},
    "kubernetes": {"kind": "kubernetes", "runs_claim": "runs", "supervisor": "installed"},
}
TITLES = {
    "slurm": ("In the batch script", "bash"),
    "kubernetes": ("In the Kubernetes manifest", "yaml"),
}


def sections(
    examples: str,
    models: dict[str, type[FrozenModel]],
    kind: Callable[[str, Any], str],
    default: Callable[[str, FieldInfo], str],
) -> Iterator[str]:
    """Yield the parts of a page.

    Args:
        examples: The file with an example of each key, below `EXAMPLES`.
        models: The models, each by the keys that lead to it, like `resources.`; in a profile after
            its kind, like `slurm:switches.`, or after `every:`.
        kind: Returns what a field takes, in words.
        default: Returns its default.
    """
    texts = yaml.safe_load((EXAMPLES / examples).read_text())
    for prefix, model in models.items():
        yield f"## {model.__name__}"
        yield (model.__doc__ or "").strip()
        documented: dict[str, str] = {}
        inherited: set[str] = set()
        for owner in reversed(model.__mro__):
            if issubclass(owner, FrozenModel) and owner is not FrozenModel:
                documented |= (own := schema.field_docstrings(owner))
                inherited |= set() if owner is model or owner not in models.values() else set(own)
        for name, field in model.model_fields.items():
            if name not in inherited:
                key = field.alias or name
                yield from _key(prefix, key, name, field, documented[name], texts, kind, default)
    if texts:
        raise ValueError(f"{examples}: there is no key {', '.join(texts)}")


def _key(
    prefix: str,
    key: str,
    name: str,
    field: FieldInfo,
    text: str,
    texts: dict[str, Any],
    kind: Any,
    default: Any,
) -> Iterator[str]:
    path = f"{prefix}{key}"
    if path not in texts:
        raise ValueError(f"{path}: write an example of this key in {EXAMPLES}")
    example = texts.pop(path)
    case = example if isinstance(example, dict) else {"example": example}
    shown = default(name, field)
    yield f"### `{path.rpartition(':')[2]}`"
    means = "" if not shown else " · required" if shown == "required" else f" · default: {shown}"
    yield f"{kind(name, field.annotation)}{means}"
    yield text
    yield _block("yaml", case["example"])
    if _is_model(field) or not case.get("rendered", True):
        return  # its own keys are shown with their effects
    site = prefix.partition(":")[0] if ":" in prefix else ""
    for place in (site,) if site in SITES else SITES:
        title, language = TITLES[place]
        word, lines = _effect(case, place, is_profile=bool(site))
        if lines:
            besides = f" of `{case[place]}`" if place in case else ""
            yield f"{title}{besides}{word}:"
            yield _block(language, "\n".join(lines))


def _is_model(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, FrozenModel)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _effect(case: dict[str, Any], place: str, *, is_profile: bool) -> tuple[str, list[str]]:
    """Return the lines that a key adds to a rendered text, or else those that it leaves out."""
    with_it = yaml.safe_load(case.get(place, case["example"]))
    besides = yaml.safe_load(case.get("with", "{}"))
    job, site = {**JOB, **case.get("job", {})}, {**SITES[place], "name": place}
    changes = besides, _merged(besides, with_it)
    if is_profile:
        texts = [_rendered({**NODES, **job}, _merged(site, change)) for change in changes]
    else:
        texts = [_rendered(_merged(job, change), site) for change in changes]
    if None in texts:
        return "", []
    added: list[str] = []
    left_out: list[str] = []
    before, after = ((text or "").splitlines() for text in texts)
    for _, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if before[a:b] != after[c:d]:
            left_out += _unindented(before[a:b])
            added += _unindented(after[c:d])
    if added:
        return "", _shortened(added, with_it)
    return ", this is left out", _shortened(left_out, with_it)


def _unindented(lines: list[str]) -> list[str]:
    lines = [line for line in lines if line.strip(" #")]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return [line[margin:] for line in lines]


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merged(below[key], value) if both else value
    if "module" in above or "command" in above:
        merged.pop("script", None)  # a job has one of the three
    return merged


def _rendered(job: dict[str, Any], site: dict[str, Any]) -> str | None:
    """Return what a job becomes at a site, without its checksums; None if it is refused there."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "job.yaml"), Path(folder, "site.yaml")
        for path, data in zip(paths, (job, site), strict=True):
            path.write_text(yaml.safe_dump(data))
        spec, profile = toolkit.load(paths[0]), toolkit.load_profile(str(paths[1]))
        try:
            text = toolkit.render(toolkit.plan(spec, profile))
        except toolkit.InputError:
            return None
    text = re.sub(r"(?m)^(# Job |# Apply |unset | *torch-deploy-toolkit/job: ).*\n", "", text)
    return re.sub(r"\b[0-9a-f]{12}\b", "…", text)


def _shortened(lines: list[str], example: dict[str, Any]) -> list[str]:
    """Return the lines, each once; if they are too many, those that say what the example says."""
    lines = list(dict.fromkeys(lines))
    if len(lines) > LINES:
        said = "|".join(map(re.escape, _values(example)))
        named = [line for line in lines if re.search(rf"(?<![\w.])({said})(?![\w.])", line)]
        lines = _unindented(named) or lines
    return [*lines[:LINES], *["…"] * (len(lines) > LINES)]


def _values(example: Any) -> Iterator[str]:
    if isinstance(example, dict):
        for key, value in example.items():
            yield from (key,) if key.startswith("-") else ()
            yield from _values(value)
    elif isinstance(example, list):
        for value in example:
            yield from _values(value)
    else:
        yield str(example)
