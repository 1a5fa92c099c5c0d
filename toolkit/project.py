"""Writes the files of a new project: a job, a script, profiles, and other usual files."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import InputError, did_you_mean
from toolkit.rendering.environment import our_environment, templates_folder

_JOB = "job.yaml"
_SCRIPT = "train.py"
_NAME_LENGTH = 32
"""The most characters that a job's name may have, as in `toolkit.job.types`."""


def examples() -> list[str]:
    """Return the names of the jobs that train with the toolkit's own code, sorted."""
    return sorted(path.stem for path in _shipped("jobs").glob("*.yaml"))


def write_project(folder: Path | str, *, example: str | None = None) -> list[Path]:
    """Write a project into a new or empty folder, and return its files.

    Args:
        folder: The project's folder; its name becomes the job's name.
        example: A job of `examples()`, instead of a job with a new script.

    Raises:
        InputError: the folder is not empty or not writable, or the example does not exist.
    """
    folder = Path(folder)
    if example is not None and example not in examples():
        raise InputError(f"no example {example!r}; {did_you_mean(example, examples())}")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError("is not empty; name a new folder", place=str(folder))
        for name, text in _files(_job_name(folder), example):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            written.append(path)
    except FileExistsError as error:
        place = str(error.filename or folder)
        raise InputError("exists already; name a new folder", place=place) from None
    except OSError as error:
        place = str(error.filename or folder)
        raise InputError(f"cannot be written: {error.strerror}", place=place) from None
    return written


def _files(name: str, example: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file, the job first."""
    if example is not None:
        text = (_shipped("jobs") / f"{example}.yaml").read_text(encoding="utf-8")
        yield _JOB, text.partition("\n")[2]  # without the path of a schema that does not exist
    template = templates_folder() / "project"
    for path in sorted(path for path in template.rglob("*") if path.is_file()):
        place = str(path.relative_to(template)).removesuffix(".j2")
        if "__pycache__" in path.parts or (example is not None and place in (_JOB, _SCRIPT)):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".j2":
            text = our_environment().from_string(text).render(name=name, example=example)
        yield {"gitignore": ".gitignore"}.get(place, place), text
    base = _shipped("k8s/base")
    for path in sorted(base.rglob("*.yaml")):
        yield f"k8s/base/{path.relative_to(base)}", path.read_text(encoding="utf-8")


def _job_name(folder: Path) -> str:
    """Return a job's name, derived from a folder's name.

    >>> _job_name(Path("/home/me/My Models_2")), _job_name(Path("Übung")), _job_name(Path("/"))
    ('my-models-2', 'ubung', 'training')
    """
    plain = unicodedata.normalize("NFKD", folder.resolve().name)  # an accent is a character then
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower())
    return name.lstrip("-0123456789")[:_NAME_LENGTH].rstrip("-") or "training"


def _shipped(name: str) -> Path:
    """Return a folder of the checkout, or of the wheel, which contains it in the package."""
    package = Path(__file__).parent
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / name
