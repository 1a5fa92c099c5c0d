"""Versions: of what people write, and of what runs write, each with a refusal of one line."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import toolkit
from tests.conftest import ROOT
from toolkit.cli import cli
from toolkit.errors import NewerFormat, ProfileError, SpecError
from toolkit.runs.evidence.progress import progress_of
from toolkit.runs.records import run_directory
from toolkit.runs.views.forward import forward
from toolkit.runs.views.notebook import html_of
from train.rundir.files import Outcome, RunDirectory, read_lines
from train.runtime.rank import RankInfo

JOB = "name: a\nmodule: m\n"


def refusal(path: Path, text: str) -> str:
    """Write a job file or a profile, and return why it is refused."""
    path.write_text(text)
    with pytest.raises((SpecError, ProfileError)) as caught:
        toolkit.load(path) if "name:" in text else toolkit.load_profile(str(path))
    return str(caught.value)


NEWER = "is newer than 1, which this toolkit reads; upgrade the toolkit"


def test_version_1_is_the_default_and_is_not_stored(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"version: 1\n{JOB}")
    (tmp_path / "b.yaml").write_text(JOB)
    jobs = [toolkit.load(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    assert jobs[0] == jobs[1]
    # As toolkits have written it that did not know the key.
    assert jobs[0].as_written() == {"name": "a", "module": "m"}
    (tmp_path / "site.yaml").write_text("kind: local\nversion: 1\n")
    profile = toolkit.load_profile(str(tmp_path / "site.yaml"))
    assert toolkit.plan(jobs[0], profile).recorded(profile) == {
        "name": "site",
        "node": {"gpus": None, "cpus": None, "memory": None},
        "env": {},
        "kind": "local",
        "runs_dir": "runs",
    }


@pytest.mark.parametrize("kind", ["local", "slurm", "kubernetes", "pbs"])
def test_a_newer_file_is_refused_for_its_version_alone(tmp_path: Path, kind: str) -> None:
    """Its other keys may mean anything: nothing is said of them."""
    path = tmp_path / "x.yaml"
    assert refusal(path, f"{JOB}version: 2\nnew: 1\n") == f"{path}:3: version: 2 {NEWER}"
    assert refusal(path, f"kind: {kind}\nversion: 31\nnew: 1\n") == f"{path}:2: version: 31 {NEWER}"


def test_a_newer_version_on_the_command_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(JOB)
    with pytest.raises(SpecError) as caught:
        toolkit.load(tmp_path / "a.yaml", ["version=2"])
    assert str(caught.value) == f"--set version=2: version: 2 {NEWER}"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", "unknown version 0; write 1, or leave the key out"),
        ("-1", "unknown version -1; write 1, or leave the key out"),
        ("true", "must be a whole number, not true"),
        ('"1"', "must be a whole number, not '1'"),
        ("1.5", "must be a whole number, not 1.5"),
    ],
)
def test_what_is_no_version_is_refused(tmp_path: Path, value: str, reason: str) -> None:
    path = tmp_path / "x.yaml"
    assert refusal(path, f"{JOB}version: {value}\n") == f"{path}:3: version: {reason}"
    assert refusal(path, f"kind: local\nversion: {value}\n") == f"{path}:2: version: {reason}"


RUN = ROOT / "tests/data/recorded-run"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of this version, in which a test raises the version of some file."""
    return shutil.copytree(RUN, tmp_path / "run")


def raise_version(path: Path, version: object = 2) -> str:
    """Raise the version in the last record of a file; return what is said of it."""
    text = path.read_text()
    head, found, tail = text.rpartition('"version": 1')
    assert found
    path.write_text(f'{head}"version": {json.dumps(version)}{tail}')
    shown = f"version {version}" if isinstance(version, int) else "no known version"
    return f"{path.name} is of {shown}, and this toolkit reads 1; upgrade the toolkit"


def printed(*argv: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command; a traceback fails the test."""
    done = CliRunner().invoke(cli, argv)
    assert done.exception is None or isinstance(done.exception, SystemExit | NewerFormat)
    if isinstance(done.exception, NewerFormat):  # main() prints it as one line
        return done.exception.exit_status, done.stdout, str(done.exception)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("version", [2, 0, "2\n", 1.5, None, [1]])
def test_a_newer_outcome_counts_as_none_and_is_told(run_dir: Path, version: object) -> None:
    said = raise_version(run_dir / "outcome.json", version)
    assert run_directory.outcome(run_dir) is None
    status = run_directory.ended_status(run_dir)
    # What the script has written still says how it ended.
    assert (status.state, status.reason) == (toolkit.RunState.SUCCEEDED, said)
    (run_dir / "logs/attempt-0/exit_status").write_text("1\n")
    (run_dir / "logs/attempt-0/reason").write_text("fatal: rank 0: x; not again\n")
    status = run_directory.ended_status(run_dir)
    assert (status.state, status.reason) == (
        toolkit.RunState.FAILED,
        f"fatal: rank 0: x; not again; {said}",
    )
    shutil.rmtree(run_dir / "logs/attempt-0")
    status = run_directory.ended_status(run_dir)
    assert (status.state, status.reason, status.lost) == (toolkit.RunState.UNKNOWN, said, True)


def test_status_tells_of_newer_metrics_in_one_line(run_dir: Path) -> None:
    said = raise_version(run_dir / "metrics.jsonl")
    code, out, _ = printed("status", str(run_dir))
    assert code == 0
    assert [line for line in out.splitlines() if "version" in line] == [f"unread:    {said}"]
    _, out, _ = printed("status", str(run_dir), "--json")
    assert (json.loads(out)["metrics"], json.loads(out)["unread"]) == (None, said)
    assert run_directory.last_figures(run_dir) == said
    assert progress_of(run_dir) is None


def test_a_notebook_tells_of_newer_metrics(run_dir: Path) -> None:
    said = raise_version(run_dir / "metrics.jsonl")
    assert html_of(toolkit.open_run(str(run_dir))).count(said) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "outcome.json"])
def test_goodput_is_not_told_from_what_is_newer(run_dir: Path, name: str) -> None:
    said = raise_version(run_dir / name)
    code, out, errors = printed("goodput", str(run_dir))
    assert (code, out, errors) == (1, "", said)


def test_metrics_and_trackers_take_nothing_that_is_newer(run_dir: Path, tmp_path: Path) -> None:
    said = raise_version(run_dir / "metrics.jsonl")
    run = toolkit.open_run(str(run_dir))
    with pytest.raises(NewerFormat, match=said):
        run.metrics()
    with pytest.raises(NewerFormat, match=said):
        forward([run], "prometheus", tmp_path / "out.prom", follow=False)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_report_tells_what_it_leaves_out(run_dir: Path, tmp_path: Path, name: str) -> None:
    said = raise_version(run_dir / name)
    page = tmp_path / "page.html"
    assert printed("report", str(run_dir), "--output", str(page))[0] == 0
    # Among the versions of the run, too, which events tell.
    assert page.read_text().count(said) == (2 if name == "events.jsonl" else 1)


def test_show_tells_of_newer_events(run_dir: Path) -> None:
    said = raise_version(run_dir / "events.jsonl")
    code, out, _ = printed("show", str(run_dir))
    assert code == 0
    assert out.splitlines()[-1] == f"unread:      {said}"
    assert "torch:" not in out


def test_records_without_a_version_are_of_the_first(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "outcome.json"):
        path = run_dir / name
        path.write_text(path.read_text().replace('"version": 1,', ""))
    run = toolkit.open_run(str(run_dir))
    assert run_directory.ended_status(run_dir).state is toolkit.RunState.SUCCEEDED
    assert (run.goodput().steps, len(run.metrics())) == (6, 6)


# ---- train


def test_train_leaves_an_outcome_of_another_version_as_it_is(run_dir: Path) -> None:
    raise_version(run_dir / "outcome.json")
    before = (run_dir / "outcome.json").read_bytes()
    directory = RunDirectory(run_dir, RankInfo(attempt=1))
    said = f"{run_dir}/outcome.json is of version 2, and this program writes 1"
    assert (directory.read_outcome(), directory.other_version()) == (None, said)
    outcome = directory.outcome_after(None, "fatal", "a mistyped flag", steps=None)
    assert isinstance(outcome, Outcome)
    assert not directory.write_outcome(outcome, early=True)
    assert not directory.write_outcome(outcome)
    assert not directory.advance(outcome)
    assert directory.superseded()
    assert (run_dir / "outcome.json").read_bytes() == before


def test_train_passes_over_lines_of_another_version(run_dir: Path) -> None:
    lines = len(read_lines(run_dir / "events.jsonl"))
    raise_version(run_dir / "events.jsonl")
    assert len(read_lines(run_dir / "events.jsonl")) == lines - 1
