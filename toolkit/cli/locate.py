"""Where in a job file stands what cannot work."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.errors import PlanError
from toolkit.job.loader import override
from toolkit.job.spec import JobSpec
from toolkit.text.yaml_reader import read_document, read_text

__all__ = ["placed"]


@contextlib.contextmanager
def placed(path: Path, overrides: Iterable[str] = ()) -> Iterator[None]:
    """Add the place in the job file to refusals of a job, as `check` shows it.

    Args:
        path: The job file.
        overrides: Assignments to its keys.

    Raises:
        PlanError: the refusal, with `FILE:LINE`.
    """
    try:
        yield
    except PlanError as error:
        document = override(read_document(read_text(path), str(path)), overrides, JobSpec)
        places = [document.place(p.key) if p.key else document.source for p in error.problems]
        raise PlanError(
            replace(problem, place=problem.place or place)
            for problem, place in zip(error.problems, places, strict=True)
        ) from None
