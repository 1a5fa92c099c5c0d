"""The keys of the job file and the profile that cause each line of a rendered text.

They are found by experiment: the text is rendered without each key, or with another value if
removal changes nothing or is invalid. Lines that differ come from that key. So this also works for
a project's own templates.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.errors import ToolkitError
from toolkit.job.spec import JobSpec
from toolkit.planning import plan
from toolkit.profile import Profile
from toolkit.rendering import payload, render

_WHOLE = frozenset(("sweep", "kubernetes", "sbatch", "notify"))
"""Keys with parts that only make sense together, or with names that the toolkit does not define."""

Path = tuple[str, ...]


def origins(job: JobSpec, profile: Profile) -> list[tuple[str, tuple[str, ...]]]:
    """Return each line of a job's rendered text, and the keys that cause it, as `a.b`.

    Keys of the profile begin with `profile:`. Unset keys with a default end with ` (default)`, and
    are left out with a project's own templates. The embedded supervisor is shown as a comment.

    Raises:
        PlanError: the job cannot work with this profile.
        RenderError: a value that the text cannot hold.
    """
    shown = payload.folded(render(plan(job, profile))).splitlines()
    lines = _text(job, profile).splitlines()
    keys: list[list[str]] = [[] for _ in lines]
    for name, variants in _variants(job, profile):
        others = (text.splitlines() for text in map(_rendered, variants) if text)
        other = next((other for other in others if other != lines), lines)
        matcher = difflib.SequenceMatcher(None, lines, other, autojunk=False)
        for what, begin, end, *_ in matcher.get_opcodes():
            for number in range(begin, end) if what != "equal" else ():
                keys[number].append(name)
    return [(line, tuple(of_line)) for line, of_line in zip(shown, keys, strict=True)]


def _text(job: JobSpec, profile: Profile) -> str:
    text = payload.folded(render(plan(job, profile)))
    # Each key changes the digest, which YAML quotes where it looks like a number.
    return text.replace(f'"{job.digest}"', job.digest).replace(job.digest, "DIGEST")


Variant = tuple[type[JobSpec] | type[Profile], dict[str, Any], JobSpec, Profile]


def _rendered(variant: Variant) -> str | None:
    kind, content, job, profile = variant
    try:
        made = kind.model_validate(content)
        return _text(made, profile) if isinstance(made, JobSpec) else _text(job, made)
    except (ToolkitError, ValidationError):
        return None


def _variants(job: JobSpec, profile: Profile) -> Iterator[tuple[str, list[Variant]]]:
    """Yield each key that is set, and the variants to try instead."""
    for made, prefix in ((job, ""), (profile, "profile:")):
        content = made.model_dump(mode="json", by_alias=True)
        own = {*_paths(made.model_dump(mode="json", by_alias=True, exclude_unset=True))}
        for path in _paths(content):
            if prefix and path in (("kind",), ("name",), ("templates_dir",)):
                continue
            if path not in own and profile.templates_dir:
                continue  # rendering such a text starts a process each time
            name = prefix + ".".join(path) + ("" if path in own else " (default)")
            others = [_without(content, path)]
            others += [_without(content, path, [value]) for value in _others(content, path)]
            yield name, [(type(made), other, job, profile) for other in others]


def _paths(content: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value and key not in _WHOLE:
            yield from _paths(value, (*above, key))
        elif value is not None:
            yield (*above, key)


def _without(content: Mapping[str, Any], path: Path, instead: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the content without a key, or with another value `instead`."""
    key, *rest = path
    made = dict(content)
    if rest:
        made[key] = _without(content[key], tuple(rest), instead)
    elif instead:
        made[key] = instead[0]
    else:
        del made[key]
    return made


def _others(content: Mapping[str, Any], path: Path) -> list[Any]:
    """Return alternative values of a key; at least one is valid."""
    value: Any = content
    for key in path:
        value = value[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value + 60]
    if isinstance(value, list):
        return [[*value, "other"]]
    return [f"{value}-other", f"/other{value}", "77s", "77m", "77GiB"]
