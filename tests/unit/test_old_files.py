"""What version 0.1 has written is read: job file, profiles, run directories, the list of runs.

tests/data/recorded-0.1 holds them as they were written: `files/` by a person; `state/` and `runs/`
by `toolkit run` (digits on two ranks) and by submissions to Slurm and Kubernetes. Programs and
tensors are left out. Paths in it begin with /tmp/recorded-0.1. Nobody edits them: SHA256SUMS.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import toolkit
from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.asked_slurm import CONFIG
from toolkit.cli import cli
from toolkit.kubernetes import KubernetesLauncher
from toolkit.runs import registry
from toolkit.slurm import SlurmLauncher

RECORDED = ROOT / "tests/data/recorded-0.1"
LOCAL, SLURM, KUBERNETES = (
    "digits-1127-135016-d5c5",
    "digits-1127-135130-y6dj",
    "digits-1127-135144-z5sw",
)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded files at another place, as those of this user."""
    folder = tmp_path / "recorded"
    shutil.copytree(RECORDED, folder)
    state = folder / "state/torch-deploy-toolkit"
    for path in (state / "runs.jsonl", *folder.glob("runs/*/launch.json")):
        path.write_text(path.read_text().replace("/tmp/recorded-0.1", str(folder)))
    state.chmod(0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    return folder


def shown(*argv: str) -> str:
    done = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_nobody_has_edited_them() -> None:
    files = {str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*") if path.is_file()}
    sums = [
        f"{hashlib.sha256((RECORDED / name).read_bytes()).hexdigest()}  {name}\n"
        for name in sorted(files - {"SHA256SUMS"})
    ]
    assert (RECORDED / "SHA256SUMS").read_text() == "".join(sums)


def test_the_job_file() -> None:
    job = toolkit.load(RECORDED / "files/job.yaml")
    assert job.as_written() == toolkit.load(RECORDED / f"runs/{LOCAL}/job.yaml").as_written()
    assert (job.name, job.module, job.time_limit_s, job.retries.requeue) == (
        "digits",
        "train",
        1800,
        1,
    )


@pytest.mark.parametrize("name", ["local", "slurm", "k8s"])
def test_profiles(name: str) -> None:
    profile = toolkit.load_profile(str(RECORDED / f"files/{name}.yaml"))
    assert profile.name == name
    assert toolkit.render(toolkit.plan(toolkit.load(RECORDED / "files/job.yaml"), profile))


def test_the_list_of_runs(recorded: Path) -> None:
    records = [run.record for run in toolkit.list_runs()]
    assert [(record.name, record.problem) for record in records] == [
        (LOCAL, ""),
        (SLURM, ""),
        (KUBERNETES, ""),
    ]


@pytest.mark.parametrize("by_path", [False, True])
def test_status(recorded: Path, by_path: bool) -> None:
    run_dir = recorded / "runs" / LOCAL
    rows = json.loads(shown("status", str(run_dir) if by_path else LOCAL, "--json"))
    assert rows["state"] == "SUCCEEDED"
    assert rows["metrics"] == {
        "version": 1,
        "attempt": 0,
        "restart": 0,
        "time": pytest.approx(1795787444.9, abs=1),
        "step": 6,
        "epoch": 1,
        "samples_seen": 1536,
        "test_accuracy": 0.8555555555555555,
        "test_loss": 1.7218514760335286,
    }


def test_goodput(recorded: Path) -> None:
    goodput = toolkit.open_run(LOCAL).goodput()
    assert (goodput.starts, goodput.steps, goodput.ranks) == (1, 6, 2)
    assert shown("goodput", LOCAL).startswith(f"{LOCAL}")


def test_report(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown("report", LOCAL, "--output", str(page))
    assert {name in page.read_text() for name in (LOCAL, "test_accuracy", "SUCCEEDED")} == {True}


def test_show(recorded: Path) -> None:
    origin = json.loads(shown("show", LOCAL, "--json"))
    assert (origin["toolkit"], origin["environment"]["torch"]) == ("0.1.0", "2.13.0+cpu")


def test_a_run_on_slurm(recorded: Path) -> None:
    def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        out = CONFIG.format("c") if argv[0] == "scontrol" else ""
        return subprocess.CompletedProcess(argv, 0, out, "")

    origin = json.loads(shown("show", SLURM, "--json"))
    assert (origin["profile"], origin["environment"]) == ("slurm", None)
    record = registry.find(SLURM)
    profile = toolkit.SlurmProfile.model_validate(dict(record.profile))
    assert profile.switches is not None
    assert (profile.switches.count, profile.kill_wait_s) == (1, 30)
    run = SlurmLauncher(profile, command=command).open(record)
    assert [job.job_id for job in run.jobs] == ["1234"]


def test_a_run_on_kubernetes(recorded: Path) -> None:
    record = registry.find(KUBERNETES)
    profile = toolkit.KubernetesProfile.model_validate(dict(record.profile))
    with FakeKubernetes() as server:
        run = KubernetesLauncher(profile, api_client=server.api_client()).open(record)
        assert run.local.manifest(profile).startswith("#")
        assert run.status().state is toolkit.RunState.UNKNOWN
