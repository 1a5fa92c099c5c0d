"""The trackers that `toolkit forward` sends metrics to, each through its own library.

Each process rewrites TensorBoard's files, and steps repeated after a failure overwrite the earlier
ones. The other trackers only append: the first process that reaches a step sends it, and values of
a repeated step are left out (they are the same, as the order of the data is).
"""

import contextlib
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.errors import InputError, LauncherError
from toolkit.text import control, untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

MARK = ".forwarded-by-toolkit"
"""Marker file in each event-file folder that the toolkit created; it changes no other folder."""

_BATCH = 200
"""Steps per request to MLflow, which accepts at most 1,000 figures."""


class Tracker(ABC):
    """The destination of one run's metrics."""

    place: str
    """Where users find the metrics."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin a start of the ranks, which repeats the steps from this one."""

    @abstractmethod
    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Add the figures of a step; `when` is its time in seconds since 1970."""

    @abstractmethod
    def flush(self) -> None:
        """Send the figures that are still in memory."""

    @abstractmethod
    def close(self, *, ended: bool) -> None:
        """Close the tracker; `ended`: the run has ended, so its last step gets no more figures."""


class TensorBoardFolder(Tracker):
    """The event files of one run, for `tensorboard --logdir`.

    Each process that forwards the run rewrites them, so that no record is duplicated.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder, empty.

        Raises:
            InputError: it exists and was not created by the toolkit.
        """
        from tensorboardX import SummaryWriter

        self._writer_of = SummaryWriter
        self.place = str(folder)
        self._folder, self._files = folder, 0
        if folder.is_symlink() or (folder.exists() and not (folder / MARK).is_file()):
            raise InputError(
                "exists and contains other files; name another folder with --output",
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
        """Begin a start of the ranks: earlier records of this step and later steps no longer count.

        TensorBoard drops them because of the record `SessionLog.START` in a newer file.
        """
        self._close()
        self._writer = self._writer_of(
            str(self._folder),
            purge_step=step if self._files else None,
            filename_suffix=f".{self._files:06d}",
        )
        self._files += 1

    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Note the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def flush(self) -> None:
        """Write the figures that are still in memory."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, ended: bool) -> None:
        """Close the newest file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Row(NamedTuple):
    """The figures of a step: its training record, and an evaluation after it."""

    step: int
    when: float
    figures: dict[str, float]


class _AppendingTracker(Tracker):
    """A tracker that cannot retract values: each step is sent once, as one row."""

    def __init__(self, *, sent: int) -> None:
        self.sent = sent
        """The last step that this or an earlier process has sent."""
        self._row: _Row | None = None

    def begin(self, step: int) -> None:
        """Forget the newest step if the new start repeats it."""
        if self._row is not None and self._row.step >= step:
            self._row = None

    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Add the figures of a step; the row before it is then complete."""
        if step <= self.sent:
            return
        if self._row is not None and self._row.step != step:
            self._pass_on(self._row)
            self._row = None
        row_figures = self._row.figures if self._row is not None else {}
        row_figures |= _renamed(figures)
        self._row = _Row(step, when, row_figures)

    def close(self, *, ended: bool) -> None:
        """Send the last row, unless the run may add to it."""
        if ended and self._row is not None:
            self._pass_on(self._row)
        self._row = None
        self.flush()

    def _pass_on(self, row: _Row) -> None:
        self.send(row)
        self.sent = row.step

    @abstractmethod
    def send(self, row: _Row) -> None:
        """Pass on one row."""


def _renamed(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under names that each tracker takes."""
    return {re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII): each for name, each in figures.items()}


class WandbRun(_AppendingTracker):
    """A run of Weights & Biases with the run's name as its id, online or offline."""

    def __init__(self, run: "Run", folder: Path) -> None:
        """Open or resume the run; W&B's own variables set project, entity and mode."""
        import wandb

        self._mark = folder / "wandb" / f"{MARK}-{run.name.replace('/', '.')}"
        self.place = f"{folder}/wandb"
        sent = -1
        with contextlib.suppress(OSError, ValueError):
            sent = int(untrusted.read_text(self._mark, limit=100))
        super().__init__(sent=sent)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.record.job,
            id=run.name.replace("/", "."),
            name=run.name,
            group=_sweep_of(run),
            config=_settings_of(run),
            resume="allow",
            reinit="create_new",  # beside the other runs of this process
            dir=str(folder),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_stats=True
            ),
        )

    def send(self, row: _Row) -> None:
        """Pass on one row."""
        self._run.log(row.figures, step=row.step)

    def flush(self) -> None:
        """Record the last step that W&B has: its library does not know it while offline."""
        self._mark.write_text(f"{self.sent}\n", encoding="utf-8")

    def close(self, *, ended: bool) -> None:
        """Wait until W&B has everything."""
        super().close(ended=ended)
        self._run.finish()


class MlflowRun(_AppendingTracker):
    """A run of MLflow on the server in MLFLOW_TRACKING_URI; a tag identifies the run."""

    TAG = "torch-deploy-toolkit.run"

    def __init__(self, run: "Run") -> None:
        """Open or resume the run in the experiment with the job's name."""
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.record.job
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        same = self._client.search_runs([number], f"tags.`{self.TAG}` = '{run.name}'")
        tags = {self.TAG: run.name, "group": _sweep_of(run) or ""}
        mlflow_run = same[0] if same else self._client.create_run(number, None, tags, run.name)
        self._id = mlflow_run.info.run_id
        self.place = f"experiment {name}"
        if not same:
            for key, value in _settings_of(run).items():
                self._client.log_param(self._id, re.sub(r"[^\w./ -]", "_", key), value[:500])
        histories = (
            self._client.get_metric_history(self._id, key) for key in mlflow_run.data.metrics
        )
        super().__init__(sent=max((each.step for one in histories for each in one), default=-1))
        self._rows: list[_Row] = []

    def send(self, row: _Row) -> None:
        """Queue one row; a full batch is sent."""
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send the rows; MLflow's server accepts at most 1,000 figures at a time."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(row.when * 1000), row.step)
            for row in self._rows
            for name, value in row.figures.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])
        self._rows.clear()

    def close(self, *, ended: bool) -> None:
        """Mark the run as finished if it has ended."""
        super().close(ended=ended)
        if ended:
            self._client.set_terminated(self._id)


class TrackioRun(_AppendingTracker):
    """A run of trackio, in its own folder of this machine (TRACKIO_DIR)."""

    def __init__(self, run: "Run") -> None:
        """Open or resume the run in the project with the job's name."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = run.record.job
        newest = SQLiteStorage.get_max_step_for_run(project, run.name)
        super().__init__(sent=-1 if newest is None else int(newest))
        self.place = f"project {project}"
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=project,
                name=run.name,
                group=_sweep_of(run),
                config=_settings_of(run),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def send(self, row: _Row) -> None:
        """Pass on one row."""
        self._run.log(row.figures, step=row.step)

    def flush(self) -> None:
        """Do nothing: a thread of trackio writes the figures."""

    def close(self, *, ended: bool) -> None:
        """Wait until trackio has everything."""
        super().close(ended=ended)
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class PrometheusFile:
    """A file for the textfile collector of Prometheus' node exporter, with the newest figures."""

    HEAD = b"# HELP toolkit_run_"

    def __init__(self, path: Path) -> None:
        """Check that the file may be replaced.

        Raises:
            InputError: it exists and was not created by the toolkit.
        """
        from prometheus_client import CollectorRegistry, Gauge

        with contextlib.suppress(FileNotFoundError):
            content = untrusted.read_bytes(path)
            if content and not content.startswith(self.HEAD):
                message = (
                    "exists and was not created by the toolkit; name another file with --output"
                )
                raise InputError(message, place=str(path))
        self.path = path
        self.registry = CollectorRegistry()
        self.figure = Gauge(
            "toolkit_run_figure", "Newest figure", ["run", "name"], registry=self.registry
        )
        self.step = Gauge("toolkit_run_step", "Newest step", ["run"], registry=self.registry)
        self.when = Gauge(
            "toolkit_run_time_seconds", "Time of the newest step", ["run"], registry=self.registry
        )

    def write(self) -> None:
        """Rewrite the whole file.

        Raises:
            InputError: it cannot be written.
        """
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(self.path), self.registry)
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            raise InputError(message, place=str(self.path)) from error


class PrometheusRun(Tracker):
    """The newest figures of one run, in a file that it shares with other runs."""

    def __init__(self, run: "Run", file: PrometheusFile) -> None:
        self._name, self._file, self.place = run.name, file, str(file.path)

    def begin(self, step: int) -> None:
        """Do nothing: the newest step counts, even if it is a repeated one."""

    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Note the figures of a step."""
        self._file.step.labels(self._name).set(step)
        self._file.when.labels(self._name).set(when)
        for name, value in figures.items():
            self._file.figure.labels(self._name, name).set(value)

    def flush(self) -> None:
        """Write the file."""
        self._file.write()

    def close(self, *, ended: bool) -> None:
        """Write the file; an ended run stays in it."""
        self._file.write()


def _sweep_of(run: "Run") -> str | None:
    sweep, slash, _ = run.name.rpartition("/")
    return sweep if slash else None


def _settings_of(run: "Run") -> dict[str, str]:
    from toolkit.runs.views.report import settings_of

    return settings_of(run)


def _tensorboard(output: Path) -> "Callable[[Run], Tracker]":
    return lambda run: TensorBoardFolder(output / run.name)


def _wandb(output: Path) -> "Callable[[Run], Tracker]":
    return lambda run: WandbRun(run, output)


def _mlflow(output: Path) -> "Callable[[Run], Tracker]":
    return MlflowRun


def _trackio(output: Path) -> "Callable[[Run], Tracker]":
    return TrackioRun


def _prometheus(output: Path) -> "Callable[[Run], Tracker]":
    file = PrometheusFile(output)
    return lambda run: PrometheusRun(run, file)


class _Kind(NamedTuple):
    """A kind of tracker."""

    opener: "Callable[[Path], Callable[[Run], Tracker]]"
    output: str
    """The default folder or file; empty if the tracker's own settings name it."""

    library: str
    """The name of its Python package."""


_KINDS = {
    "tensorboard": _Kind(_tensorboard, "tensorboard", "tensorboardX"),
    "wandb": _Kind(_wandb, ".", "wandb"),
    "mlflow": _Kind(_mlflow, "", "mlflow"),
    "trackio": _Kind(_trackio, "", "trackio"),
    "prometheus": _Kind(_prometheus, "toolkit.prom", "prometheus_client"),
}

TRACKERS: Sequence[str] = tuple(_KINDS)
"""Their names."""


@contextlib.contextmanager
def opened(runs: "Sequence[Run]", to: str, output: Path | None = None) -> "Iterator[list[Tracker]]":
    """Open a tracker for each run; an error of the tracker's library becomes one message.

    Args:
        runs: The runs, none of them a sweep.
        to: One of `TRACKERS`.
        output: The folder or file that is written; None for the default.

    Raises:
        InputError: the library is not installed, or the output was not created by the toolkit.
        LauncherError: the tracker has failed; for example, its server cannot be reached.
    """
    kind = _KINDS[to]
    if output is not None and not kind.output:
        raise InputError(f"{to} has its own settings for that", place="--output")
    try:
        open_one = kind.opener(output or Path(kind.output))
        yield [open_one(run) for run in runs]
    except ImportError as error:
        if (error.name or "").partition(".")[0] != kind.library:
            raise
        package = kind.library.replace("_", "-")
        message = f"needs {kind.library}: pip install {package}"
        raise InputError(message, place=f"--to {to}") from None
    except (InputError, LauncherError):
        raise
    except Exception as error:  # of a library, which may raise anything
        words = control.printable(str(error)).strip() or type(error).__name__
        raise LauncherError(f"{to}: {words}") from error
