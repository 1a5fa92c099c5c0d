"""Passes the metrics of runs on to a tracker, from a process of its own.

The training writes `metrics.jsonl` and knows of no tracker, so that it neither waits for one nor
fails with it. What is passed on is one curve over all attempts: steps that are made again after a
failure take the place of the earlier ones.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, LauncherError
from toolkit.runs.curves import figures_of
from toolkit.runs.run import pauses
from toolkit.runs.run_directory import MetricReader
from toolkit.text import untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

MARK = ".forwarded-by-toolkit"
"""A file in each folder of event files that was made here; other folders are left alone."""

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.=+-]*)?", re.ASCII)
"""Names of runs, or of a sweep and its point. Who has written a run directory may have named the
run anything, such as a path to somewhere else."""

_LINE_BYTES = 1 << 16
_READ_BYTES = 64 << 20
"""How much is read at a time, so that a file of gibibytes is no memory of gibibytes."""


class TensorBoardFolder:
    """The event files of one run, for `tensorboard --logdir`.

    They are written anew by each process that forwards the run, so that no record is there twice.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, empty.

        Raises:
            InputError: it is there and was not made here, or tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError(
                "needs tensorboardX: pip install 'torch-deploy-toolkit[tensorboard]'",
                place="--to tensorboard",
            ) from None
        self._writer_of = SummaryWriter
        self._folder, self._files = folder, 0
        if folder.is_symlink() or (folder.exists() and not (folder / MARK).is_file()):
            raise InputError(
                "is there and holds other files; name another folder with --output",
                place=str(folder),
            )
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            (folder / MARK).touch()
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", place=str(folder)) from error
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Begin a start of the ranks: what was recorded from this step on does not count any more.

        TensorBoard leaves it out by the record `SessionLog.START` of a newer file.
        """
        self.close()
        self._writer = self._writer_of(
            str(self._folder),
            purge_step=step if self._files else None,
            filename_suffix=f".{self._files:06d}",
        )
        self._files += 1

    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Note the figures of a step, made at a time in seconds since 1970."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def flush(self) -> None:
        """Write what is still held in memory."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the newest file."""
        if self._writer is not None:
            self._writer.close()


class _Forwarder:
    """Passes one run on, as far as it has recorded."""

    def __init__(self, run: "Run", sink: TensorBoardFolder) -> None:
        self.run, self.sink = run, sink
        self._reader, self._offset = MetricReader(), 0
        self.records = 0
        """How many records have been passed on."""

    def step(self) -> None:
        """Pass on what has been recorded since the last time.

        Raises:
            LauncherError: the run directory cannot be seen from here.
        """
        with self.run.recorded("metrics.jsonl") as folder:
            for line in self._new_lines(folder / "metrics.jsonl"):
                record = self._reader.read(line)
                if record is None:
                    continue
                if record.opens_start:
                    self.sink.begin(record.step)
                when = untrusted.moment(record.values.get("time"))
                if when is not None:
                    self.sink.add(record.step, when, figures_of(record))
                    self.records += 1
        self.sink.flush()

    def _new_lines(self, path: Path) -> Iterator[object]:
        with contextlib.suppress(FileNotFoundError), untrusted.open_untrusted(path) as file:
            file.seek(self._offset)
            limit = _READ_BYTES
            while limit > 0 and (line := file.readline(_LINE_BYTES)):
                if not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                    return  # just being written
                limit -= len(line)
                self._offset += len(line)
                with contextlib.suppress(ValueError):  # torn by a kill, or the rest of a long line
                    yield untrusted.parse_json(line)


def forward(runs: "Sequence[Run]", folder: Path, *, follow: bool = True) -> dict[str, int]:
    """Pass the metrics of runs on to TensorBoard until all have ended; of a sweep, each point's.

    Args:
        runs: The runs.
        folder: Where each run gets a folder with its name; `tensorboard --logdir` reads them all.
        follow: Whether to go on until the runs have ended.

    Returns:
        How many records were passed on, by the runs' names.

    Raises:
        InputError: a folder is there and was not made here, or tensorboardX is not installed.
        LauncherError: a run directory cannot be seen from here.
    """
    parts = [part for run in runs for part in run.parts]
    for part in parts:
        if not _NAME.fullmatch(part.name):
            raise InputError(f"the run's name, {part.name!r}, can be no folder", place=part.uri)
    forwarders = [_Forwarder(part, TensorBoardFolder(folder / part.name)) for part in parts]
    active = list(forwarders)
    try:
        for pause_s in pauses(first_s=1.0, longest_s=10.0):
            # Asked before reading: what a run records until its end is read afterwards.
            ended = [_has_ended(one.run) for one in active]
            for one in active:
                before = -1
                while before != (before := one.records):
                    one.step()
            active = [one for one, over in zip(active, ended, strict=True) if not over]
            if not active or not follow:
                break
            time.sleep(pause_s)
    finally:
        for one in forwarders:
            one.sink.close()
    return {one.run.name: one.records for one in forwarders}


def _has_ended(run: "Run") -> bool:
    try:
        status = run.status()
    except LauncherError:  # a cluster that is away for a moment
        return False
    return status.state.final or status.lost
