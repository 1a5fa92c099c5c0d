"""What a login node has left on the laptop: links in mirrors, odd jobs and points."""

import os
import time
from pathlib import Path

import pytest

from toolkit.errors import LauncherError
from toolkit.runs.records.points import read_points
from toolkit.slurm.login.mirror import Mirrors
from toolkit.slurm.login.ssh import SshConnection
from toolkit.slurm.submission import SlurmJob, read_jobs, write_jobs

GOOD = '{"version": 1, "job_id": "7", "mode": "", "points": null, "after": "", "folder": "/a"}'

ODD = [
    b"",
    b"[]",
    b"null",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"version": 1}',
    b'{"version": 1, "job_id": 7, "points": 3}',
    b'{"version": 1, "job_id": "-1"}',
    b'{"version": 1, "job_id": "1; rm -r x"}',
    b'{"version": 1, "job_id": "1", "points": ["x", 1e400]}',
    b'{"version": 1, "job_id": "1", "mode": "\\u001b[2J"}',
    b'{"version": 1, "job_id": "1", "folder": "/a\\u0007b"}',
]


def test_links_of_an_older_mirror_are_removed_and_not_followed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "id_rsa").write_text("PRIVATE KEY\n")
    mirrors = tmp_path / "mirrors"
    run_dir = mirrors / "run"
    (run_dir / "attempts").mkdir(parents=True)
    (run_dir / "outcome.json").write_text("{}")
    (run_dir / "logs").symlink_to(private)
    (run_dir / "attempts/log").symlink_to(private / "id_rsa")
    os.mkfifo(run_dir / "running.lock")
    (mirrors / "other").symlink_to(private)

    Mirrors(SshConnection("nowhere.invalid"), mirrors).fetch(time.time())

    left = {str(p.relative_to(mirrors)) for p in mirrors.rglob("*") if not p.name.startswith(".")}
    assert left == {"run", "run/attempts", "run/outcome.json"}
    assert (private / "id_rsa").read_text() == "PRIVATE KEY\n"


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_line_among_the_jobs_takes_no_other_with_it(tmp_path: Path, odd: bytes) -> None:
    (tmp_path / "jobs.jsonl").write_bytes(odd + b"\n" + GOOD.encode() + b"\n")
    assert read_jobs(tmp_path) == [SlurmJob(job_id="7", folder="/a")]


@pytest.mark.parametrize("odd", ODD[1:], ids=range(1, len(ODD)))
def test_odd_points_are_told_in_one_line(tmp_path: Path, odd: bytes) -> None:
    (tmp_path / "points.jsonl").write_bytes(odd + b"\n")
    with pytest.raises(LauncherError, match="points of the sweep cannot be read") as caught:
        read_points(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_sweep_without_points_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").touch()
    with pytest.raises(LauncherError, match="the points of the sweep cannot be read"):
        read_points(tmp_path)


def test_jobs_and_points_are_neither_read_nor_written_through_links(tmp_path: Path) -> None:
    mine = tmp_path / "bashrc"
    mine.write_text(f"{GOOD}\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("jobs.jsonl", "points.jsonl"):
        (run_dir / name).symlink_to(mine)
    assert read_jobs(run_dir) == []
    with pytest.raises(LauncherError, match="cannot be written"):
        write_jobs(run_dir, [SlurmJob(job_id="8")])
    with pytest.raises(LauncherError, match="cannot be read"):
        read_points(run_dir)
    assert mine.read_text() == f"{GOOD}\n"
