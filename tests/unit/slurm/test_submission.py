"""Submitting once: after any kill and any answer of sbatch, there is one job, and it is found."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster
from tests.support.asked_slurm import CONFIG, JOBS, job_row
from tests.support.run_records import remember
from tests.support.slurm_site import Site
from toolkit.runs.records import registry, submission_journal
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.records.state_dir import state_folder
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.run import SlurmRun

LATER = {"begin": "now+1hour"}


def controller(cluster: Cluster) -> int:
    """Return the process of the controller, which has started another one of the same name."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"slurmctld" and f"{cluster.folder}/".encode() in b" ".join(words[1:]):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    (first,) = (pid for pid, parent in parents.items() if parent not in parents)
    return first


def queued(cluster: Cluster, *columns: str) -> list[str]:
    """Return the jobs that Slurm has, the oldest first."""
    return sorted(cluster.slurm("squeue", "-h", "-t", "PD,R", "-o", "|".join(columns)).splitlines())


def waiting(site: Site, **more: Any) -> toolkit.SlurmPlan:
    profile = site.profile.model_copy(update={"sbatch": LATER})
    job = {"name": "probe", "command": ["true"], **more}
    return toolkit.plan(toolkit.JobSpec.model_validate(job), profile)


@pytest.mark.slurm
def test_a_controller_that_answers_too_late_has_the_job_once(cluster: Cluster, site: Site) -> None:
    submit_a_chain_to_one_that_answers_too_late(cluster, site)


def submit_a_chain_to_one_that_answers_too_late(cluster: Cluster, site: Site) -> None:
    process = controller(cluster)
    said: list[str] = []

    def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        stops = argv[0] == "sbatch" and len(said) == 1  # the second job of the chain
        if stops:
            os.kill(process, signal.SIGSTOP)
        try:
            done = site._command(argv)
        finally:
            os.kill(process, signal.SIGCONT)
        if argv[0] == "sbatch":
            said.append(done.stderr)
        return done

    made = waiting(site)
    run = SlurmLauncher(made.profile, command=command).submit(made, chain=3)
    assert "Socket timed out on send/recv operation" in said[1]
    assert len(said) == 3
    ids = [job.job_id for job in run.jobs]
    assert queued(cluster, "%i") == ids
    assert queued(cluster, "%i", "%E")[1] == f"{ids[1]}|afterany:{ids[0]}(unfulfilled)"
    assert [job.after for job in run.jobs] == ["", f"afterany:{ids[0]}", f"afterany:{ids[1]}"]


def scripted(answers: Sequence[str | None], queue: Sequence[str]) -> Any:
    """Return a Slurm whose sbatch gives these answers (None: a time-out), and its queries.

    `queue` has squeue's answers in their order.
    """
    asked: list[str] = []
    sent: list[str] = []
    left, looks = list(answers), list(queue)

    def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        asked.append(argv[0])
        if argv[0] == "scontrol":
            return subprocess.CompletedProcess(argv, 0, CONFIG.format("c"), "")
        if argv[0] == "squeue":
            shown = (looks.pop(0) if looks else "").replace("COMMAND", " ".join(sent))
            shown = shown.replace("SCRIPT", sent[0])
            return subprocess.CompletedProcess(argv, 0, JOBS + shown, "")
        sent[:] = [word for word in argv[1:] if not word.startswith("--")]
        if (answer := left.pop(0)) is None:
            text = "sbatch: error: Batch job submission failed: Zero Bytes were transmitted"
            return subprocess.CompletedProcess(argv, 1, "", text)
        if answer == "welcome":
            return subprocess.CompletedProcess(argv, 0, "Welcome to site\n12\n", "")
        said = f"Submitted batch job {answer}\n"
        return subprocess.CompletedProcess(argv, 0 if answer.isdecimal() else 1, said, answer)

    return command, asked


ROW = job_row("{}", "PENDING", reason="Priority", command="{}")


@pytest.mark.parametrize(
    ("answers", "queue", "asked"),
    [
        (["7"], [], ["sbatch"]),
        ([None], [ROW.format("7", "COMMAND")], ["sbatch", "squeue"]),
        ([None], ["", "", "", ROW.format("7", "COMMAND")], ["sbatch", *["squeue"] * 4]),
        ([None], [ROW.format("7", "SCRIPT")], ["sbatch", "squeue"]),  # from 24.11 on
        ([None, "7"], [""] * 4, ["sbatch", *["squeue"] * 4, "sbatch"]),
        (["welcome"], [ROW.format("7", "COMMAND")], ["sbatch", "squeue"]),
        # Another run's job, and another job of this run, are not the submitted job.
        (
            [None, "7"],
            [ROW.format("5", "/other.sbatch /other") + ROW.format("6", "COMMAND continue")],
            ["sbatch", *["squeue"] * 4, "sbatch"],
        ),
    ],
)
def test_after_an_unclear_answer_the_job_is_looked_for_before_a_retry(
    answers: Sequence[str | None],
    queue: Sequence[str],
    asked: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.slurm.submission._PAUSES_S", (0.0,) * 7)
    command, seen = scripted(answers, queue)
    profile = toolkit.SlurmProfile(name="s", runs_dir=str(tmp_path))
    job = toolkit.JobSpec(name="probe", command=("true",))
    run = SlurmLauncher(profile, command=command).submit(toolkit.plan(job, profile))
    assert run.uri == "slurm://c/7"
    assert seen == ["scontrol", *asked]


@pytest.mark.parametrize(
    "printed",
    [
        "Submitted batch job 7\n",
        "Submitted batch job 7 on cluster c\r\n",
        "---- Welcome to site 12 ----\n--> Verifying job 3 ... OK\n12\nSubmitted batch job 7\n",
        "No reservation for this job\n\x1b[32mSubmitted batch job 7\x1b[0m\n12;c\n--> See you\n",
    ],
)
def test_what_a_sites_sbatch_prints_around_the_id_is_no_doubt(printed: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        asked.append(argv[0])
        said = printed if argv[0] == "sbatch" else CONFIG.format("c")
        return subprocess.CompletedProcess(argv, 0, said, "module: loaded\n")

    profile = toolkit.SlurmProfile(name="s", runs_dir=str(tmp_path))
    job = toolkit.JobSpec(name="probe", command=("true",))
    run = SlurmLauncher(profile, command=command).submit(toolkit.plan(job, profile))
    assert (run.uri, asked) == ("slurm://c/7", ["scontrol", "sbatch"])


def test_what_stays_unclear_keeps_the_run_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.slurm.submission._PAUSES_S", (0.0,) * 7)
    command, _ = scripted([None] * 9, [])
    profile = toolkit.SlurmProfile(name="s", runs_dir=str(tmp_path))
    launcher = SlurmLauncher(profile, command=command)
    job = toolkit.JobSpec(name="probe", command=("true",))
    with pytest.raises(
        toolkit.LauncherError, match=r"it is unknown whether Slurm has the job of probe-.*: "
    ):
        launcher.submit(toolkit.plan(job, profile))
    (run_dir,) = tmp_path.iterdir()
    (record,) = registry.records()
    assert (record.name, record.run_dir) == (run_dir.name, run_dir)
    assert (run_dir / "probe.sbatch").exists()


def test_the_rest_of_a_chain_whose_submission_was_cut_short_can_be_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.slurm.submission._PAUSES_S", (0.0,) * 7)
    sent: list[Sequence[str]] = []
    rows: list[str] = []
    away = True

    def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        done = functools.partial(subprocess.CompletedProcess[str], argv)
        if argv[0] == "scontrol":
            return done(0, CONFIG.format("c"), "")
        if away and sent and argv[0] in ("sbatch", "squeue"):
            return done(1, "", "slurm_load_jobs error: Socket timed out on send/recv operation")
        if argv[0] == "squeue":
            return done(0, JOBS + "".join(rows), "")
        if argv[0] == "sbatch":
            sent.append(argv)
            words = " ".join(word for word in argv[1:] if not word.startswith("--"))
            rows.append(job_row(f"{6 + len(sent)}", "PENDING", reason="Priority", command=words))
            return done(0, f"Submitted batch job {6 + len(sent)}\n", "")
        return done(0, "", "")

    profile = toolkit.SlurmProfile(name="s", runs_dir=str(tmp_path))
    launcher = SlurmLauncher(profile, command=command)
    job = toolkit.JobSpec(name="probe", command=("true",))
    with pytest.raises(toolkit.LauncherError, match=r"`toolkit resubmit .*` submits it if not"):
        launcher.submit(toolkit.plan(job, profile), chain=3)
    away = False
    (record,) = registry.records()
    run = launcher.open(record)
    assert [job.job_id for job in run.jobs] == ["7"]
    assert [job.job_id for job in launcher.open(record).jobs] == ["7"]
    again = launcher.resubmit(launcher.open(record))
    assert isinstance(again, SlurmRun)
    assert [(job.job_id, job.mode) for job in again.jobs] == [
        ("7", ""),
        ("8", "chain"),
        ("9", "chain"),
    ]
    assert len(sent) == 3
    assert not list(registry.intents_folder().glob("*.json"))
    with pytest.raises(toolkit.LauncherError, match="has not ended"):
        launcher.resubmit(again)


# ---- The submitting process is killed


def run_toolkit(cluster: Cluster, path: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    environ = {**cluster.environ, **{k: v for k, v in os.environ.items() if k.startswith("XDG_")}}
    environ["PATH"] = f"{path}:{environ['PATH']}"
    return subprocess.run(
        [TOOLKIT, *argv], env=environ, capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.fixture
def deadly(cluster: Cluster, tmp_path: Path) -> Path:
    """A folder whose sbatch kills its caller before or after it has called the real one."""
    real = shutil.which("sbatch", path=cluster.environ["PATH"])
    folder = tmp_path / "bin"
    folder.mkdir()
    text = f"""#!/bin/bash
case $(cat {folder}/when) in
before) kill -9 $PPID; exit 1 ;;
after) said=$({real} "$@"); kill -9 $PPID; exit 0 ;;
*) exec {real} "$@" ;;
esac
"""
    (folder / "sbatch").write_text(text)
    (folder / "sbatch").chmod(0o755)
    return folder


@pytest.fixture
def files(tmp_path: Path, site: Site) -> tuple[str, str]:
    """A job and a profile under which it waits."""
    (tmp_path / "job.yaml").write_text("name: probe\ncommand: ['true']\n")
    lines = f"kind: slurm\nruns_dir: {site.runs}\nsbatch: {{begin: now+1hour}}\n"
    (tmp_path / "site.yaml").write_text(lines)
    return str(tmp_path / "job.yaml"), str(tmp_path / "site.yaml")


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_whose_submitter_was_killed_is_found_again(
    cluster: Cluster, deadly: Path, files: tuple[str, str]
) -> None:
    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            run_toolkit(cluster, deadly, "list", "--json").stdout
        )
        return found

    job, profile = files
    when = deadly / "when"
    when.write_text("after")
    done = run_toolkit(cluster, deadly, "submit", job, "--to", profile, "--chain", "2")
    assert done.returncode == -signal.SIGKILL
    (job_id,) = queued(cluster, "%i")
    (row,) = rows()
    assert (row["uri"], row["state"]) == (f"slurm://sandbox/{job_id}", "PENDING")
    run_dir = Path(row["run_dir"])
    assert json.loads((run_dir / "launch.json").read_text())["uri"] == row["uri"]
    assert rows() == [row]

    # Submitted again, and killed again: the new job is known to be the run's.
    assert run_toolkit(cluster, deadly, "cancel", row["name"]).returncode == 0
    assert queued(cluster, "%i") == []
    assert run_toolkit(cluster, deadly, "resubmit", row["name"]).returncode == -signal.SIGKILL
    (again,) = queued(cluster, "%i")
    assert [row["state"] for row in rows()] == ["PENDING"]
    written = (run_dir / "jobs.jsonl").read_text().splitlines()
    assert [json.loads(line)["job_id"] for line in written] == [job_id, again]


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_that_never_came_to_sbatch_is_submitted_when_told(
    cluster: Cluster, deadly: Path, files: tuple[str, str]
) -> None:
    job, profile = files
    (deadly / "when").write_text("before")
    done = run_toolkit(cluster, deadly, "submit", job, "--to", profile)
    assert done.returncode == -signal.SIGKILL
    (record,) = registry.records()
    shown = run_toolkit(cluster, deadly, "status", record.name).stdout
    assert "UNKNOWN" in shown
    assert "cut short, and Slurm has no job of it yet" in shown

    done = run_toolkit(cluster, deadly, "cancel", record.name)
    assert done.returncode == 1
    assert "cannot be cancelled: its submission was cut short" in done.stderr

    path = registry.intents_folder() / f"{record.name}.json"
    path.write_text(path.read_text().replace(f'"created": {record.created}', '"created": 0.0'))
    shown = run_toolkit(cluster, deadly, "status", record.name).stdout
    assert "FAILED" in shown
    assert f"Slurm never received the job; `toolkit resubmit {record.name}` submits it" in shown

    (deadly / "when").write_text("never")
    done = run_toolkit(cluster, deadly, "resubmit", record.name)
    assert done.returncode == 0, done.stderr
    (job_id,) = queued(cluster, "%i")
    assert done.stdout == f"slurm://sandbox/{job_id}\n"
    (found,) = registry.records()
    assert (found.uri, found.name) == (f"slurm://sandbox/{job_id}", record.name)
    assert not list(registry.intents_folder().iterdir())


def test_what_somebody_is_submitting_is_left_to_him(tmp_path: Path) -> None:
    with submission_journal.begin(tmp_path, "run", {"a": 1}) as intent:
        assert submission_journal.take(tmp_path, "run") is None
        assert list(submission_journal.orphans(tmp_path)) == []
        with pytest.raises(toolkit.LauncherError, match="run is being submitted by another"):
            submission_journal.begin(tmp_path, "run", {"a": 2})
    assert list(submission_journal.orphans(tmp_path)) == [{"a": 1}]
    with submission_journal.begin(tmp_path, "run", {"a": 3}) as intent:
        intent.done()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "torn.json").write_text('{"version": 1, "a"')
    (tmp_path / "newer.json").write_text('{"version": 2}')
    assert list(submission_journal.orphans(tmp_path)) == []


def test_a_line_that_a_full_disk_cut_off_takes_no_other_with_it(own_user: Path) -> None:
    profile = toolkit.SlurmProfile(name="s")

    def add(name: str) -> RunRecord:
        return remember(f"slurm://c/{name}", name=name, job="j", profile=profile)

    first, _ = add("a"), add("b")
    path = own_user / "state/torch-deploy-toolkit/runs.jsonl"
    os.truncate(path, path.stat().st_size - 20)
    third = add("c")
    assert list(registry.records()) == [first, third]
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n" + b"[" * 100_000 + b"\n")
    assert list(registry.records()) == [first, third]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_nobody_else_may_enter_the_folder_of_the_state(mask: int, own_user: Path) -> None:
    before = os.umask(mask)
    try:
        folder = state_folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o777 & ~mask)  # as an earlier version made it
        registry.check()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_state_folder_of_somebody_else_is_refused(own_user: Path) -> None:
    os.chown(state_folder(), 12345, 12345)
    with pytest.raises(toolkit.LauncherError, match="belongs to the user with the id 12345, who"):
        list(registry.records())


def test_a_record_of_an_older_version_is_still_a_record(tmp_path: Path, own_user: Path) -> None:
    profile = toolkit.SlurmProfile(name="s")
    run = remember("slurm://c/1", name="a", job="j", profile=profile)
    line = (own_user / "state/torch-deploy-toolkit/runs.jsonl").read_text()
    assert "remote_dir" not in json.loads(line), "an older version knows no such key"
    assert list(registry.records()) == [run]
    far = remember("slurm://c/2", name="b", job="j", profile=profile, remote_dir="/there/b")
    assert registry.find("/there/b") == far
