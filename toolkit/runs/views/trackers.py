"""The trackers that `toolkit forward` passes metrics on to, each by its own library.

TensorBoard's files are written anew by each process, and steps that are made again after a failure
take the place of the earlier ones. The other trackers only append: each step is passed on once, by
whichever process comes first, and the values of a step that is made again are left out (they are
the same, as the order of the data is).
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
"""A file in each folder of event files that was made here; other folders are left alone."""

_BATCH = 200
"""How many steps MLflow is sent at a time; it takes 1,000 figures."""


class Tracker(ABC):
    """Where the metrics of one run go."""

    place: str
    """Where people find them."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin a start of the ranks, which makes the steps from this one on again."""

    @abstractmethod
    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Note the figures of a step, made at a time in seconds since 1970."""

    @abstractmethod
    def flush(self) -> None:
        """Pass on the figures that are still in memory."""

    @abstractmethod
    def close(self, *, ended: bool) -> None:
        """End; `ended`: the run has, so that its last step gets no more figures."""


class TensorBoardFolder(Tracker):
    """The event files of one run, for `tensorboard --logdir`.

    They are written anew by each process that forwards the run, so that no record is there twice.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, empty.

        Raises:
            InputError: it is there and was not made here.
        """
        from tensorboardX import SummaryWriter

        self._writer_of = SummaryWriter
        self.place = str(folder)
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
        """Begin a start of the ranks: earlier records of this step and later ones no longer count.

        TensorBoard leaves it out by the record `SessionLog.START` of a newer file.
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
    """The figures of a step: those of its training record, and of an evaluation after it."""

    step: int
    when: float
    figures: dict[str, float]


class _AppendingTracker(Tracker):
    """A tracker that cannot take anything back: each step is passed on once, as one row."""

    def __init__(self, *, sent: int) -> None:
        self.sent = sent
        """The last step that has been passed on, also by an earlier process."""
        self._row: _Row | None = None

    def begin(self, step: int) -> None:
        """Forget the newest step if it is made again."""
        if self._row is not None and self._row.step >= step:
            self._row = None

    def add(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Note the figures of a step; the row before it is complete then."""
        if step <= self.sent:
            return
        if self._row is not None and self._row.step != step:
            self._pass_on(self._row)
            self._row = None
        row_figures = self._row.figures if self._row is not None else {}
        row_figures |= _renamed(figures)
        self._row = _Row(step, when, row_figures)

    def close(self, *, ended: bool) -> None:
        """Pass on the last row, unless the run may add to it."""
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
        """Open the run, or go on with it; W&B's own variables name project, entity and mode."""
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
        """Write down the last step that W&B has: its library cannot tell while it is offline."""
        self._mark.write_text(f"{self.sent}\n", encoding="utf-8")

    def close(self, *, ended: bool) -> None:
        """Wait until W&B has everything."""
        super().close(ended=ended)
        self._run.finish()


class MlflowRun(_AppendingTracker):
    """A run of MLflow on the server that MLFLOW_TRACKING_URI names, found again by a tag."""

    TAG = "torch-deploy-toolkit.run"

    def __init__(self, run: "Run") -> None:
        """Open the run in the experiment of the job's name, or go on with it."""
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
        """Pass on one row, with those before it."""
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send the rows; at most 1,000 figures at a time, as MLflow's server demands."""
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
        """Mark the run as finished, if it is."""
        super().close(ended=ended)
        if ended:
            self._client.set_terminated(self._id)


class TrackioRun(_AppendingTracker):
    """A run of trackio, in its own folder of this machine (TRACKIO_DIR)."""

    def __init__(self, run: "Run") -> None:
        """Open the run in the project of the job's name, or go on with it."""
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
        """Do nothing: a thread of trackio writes."""

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
            InputError: it is there and was not made here.
        """
        from prometheus_client import CollectorRegistry, Gauge

        with contextlib.suppress(FileNotFoundError):
            content = untrusted.read_bytes(path)
            if content and not content.startswith(self.HEAD):
                message = "is there and was not made here; name another file with --output"
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
        """Write the file anew, whole.

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
        """Do nothing: the newest step counts, also if it is made again."""

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
        """Write the file; a run that has ended stays in it."""
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
    """The folder or file by default; empty if the tracker's own settings say where."""

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
        InputError: the library is not installed, or the output belongs to somebody else.
        LauncherError: the tracker has failed, such as a server that cannot be reached.
    """
    kind = _KINDS[to]
    if output is not None and not kind.output:
        raise InputError(f"{to} has settings of its own for that", place="--output")
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
