"""The role `points`: as many runs at a time as fit, each with GPUs of its own, and their end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import Until
from tests.support.processes import with_environment
from toolkit.supervisor.points import Options, at_once, gpus_here

POINTS = ["0000-a=1", "0001-a=2", "0002-a=3", "0003-a=4"]

# A script that runs until it is told to end; it notes what it was given.
SCRIPT = """
cd "$1"; mkdir -p logs/attempt-0
trap 'echo stopped >stopped; exit 3' TERM
echo "gpus=${CUDA_VISIBLE_DEVICES-} ${2-} ${3-}" >>begun
until [ -e ../go ]; do sleep 0.05; done
[ "${1##*/}" != 0001-a=2 ] || [ -e ../mended ] || exit 5
echo 0 >logs/attempt-0/exit_status
"""


def options(**changes: object) -> Options:
    values: dict[str, Any] = {"run_dir": "r", "mode": "", "command": [], "points": POINTS}
    values |= {"most": None, "cores": 1, "gpus": 0, "stop_timeout_s": 60.0, "time_limit_s": 1.0}
    return Options(**{**values, "tied_to": None, "lock": None, **changes})


@pytest.mark.parametrize(
    ("changes", "cores", "gpus", "expected"),
    [
        ({}, 3, 0, 3),
        ({}, 64, 0, 4),
        ({"cores": 3}, 8, 0, 2),
        ({"cores": 16}, 8, 0, 1),
        ({"cores": 2, "most": 3}, 8, 0, 3),
        ({"most": 30}, 3, 0, 3),
        ({"gpus": 4}, 64, 8, 2),
        ({"gpus": 2, "cores": 64}, 64, 8, 1),
    ],
)
def test_as_many_points_run_at_once_as_fit(
    changes: dict[str, int], cores: int, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert at_once(options(**changes), gpus) == expected


def test_gpus_are_those_that_the_user_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert gpus_here() == ["5", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")  # CUDA reads no further than -1
    assert gpus_here() == ["1"]
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpus_here() == []


def test_gpus_are_counted_from_0_also_in_a_container_with_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    paths = ["/dev/nvidia7", "/dev/nvidia5", "/dev/nvidiactl"]
    monkeypatch.setattr("glob.glob", lambda pattern: paths)
    assert gpus_here() == ["0", "1"]


class Sweep:
    """A sweep whose points run the script above."""

    def __init__(self, folder: Path, until: Until) -> None:
        self.folder, self._until, self.mark = folder / "sweep", until, f"POINTS={folder}"
        self._script, self.said = folder / "run.sh", folder / "said"
        self._script.write_text(SCRIPT)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, **environ: str) -> "subprocess.Popen[bytes]":
        name, _, value = self.mark.partition("=")
        argv = [sys.executable, "-m", "toolkit.supervisor", "points", str(self.folder), *more]
        argv += [*(f"--point={point}" for point in POINTS), "--", "bash", str(self._script)]
        with self.said.open("wb") as said:
            env = {**os.environ, name: value, **environ}
            self.process = subprocess.Popen(argv, stderr=said, env=env)
        return self.process

    def text(self, name: str) -> dict[str, str]:
        """Return a file of each point that has it."""
        found = {point: self.folder / point / name for point in POINTS}
        return {point: path.read_text() for point, path in found.items() if path.is_file()}

    def have_begun(self, *points: str) -> None:
        self._until(lambda: [*self.text("begun")] == [*points], f"{points} run")

    def go(self) -> int:
        (self.folder / "go").touch()
        assert self.process is not None
        return self.process.wait(300)


@pytest.fixture
def sweep(tmp_path: Path, until: Until) -> Iterator[Sweep]:
    made = Sweep(tmp_path, until)
    yield made
    if made.process and made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    until(lambda: not with_environment(made.mark), "no process is left")


def test_points_wait_for_their_turn_and_the_first_failure_is_the_status(sweep: Sweep) -> None:
    sweep.start("--most=2", "--cores=0")
    sweep.have_begun(*POINTS[:2])
    assert sweep.go() == 5
    assert [*sweep.text("begun")] == POINTS
    assert [*sweep.text("logs/attempt-0/exit_status").values()] == ["0\n", "5\n", "0\n", "0\n"]


def test_points_at_a_time_have_gpus_of_their_own(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.start("--gpus=2", "--cores=0", CUDA_VISIBLE_DEVICES="3,4,5,6,9")
    sweep.have_begun(*POINTS[:2])
    assert sweep.go() == 5
    used = [line.split()[0] for line in sweep.text("begun").values()]
    assert used[:2] == ["gpus=3,4", "gpus=5,6"]
    assert set(used) == {"gpus=3,4", "gpus=5,6"}


def test_a_signal_stops_those_that_run_and_starts_no_other(sweep: Sweep) -> None:
    process = sweep.start("--most=2", "--cores=0")
    sweep.have_begun(*POINTS[:2])
    process.terminate()
    assert process.wait(300) == 3
    assert [*sweep.text("stopped")] == [*sweep.text("begun")] == POINTS[:2]


def test_points_do_not_outlive_a_killed_supervisor(sweep: Sweep, until: Until) -> None:
    process = sweep.start("--most=2", "--cores=0")
    sweep.have_begun(*POINTS[:2])
    process.kill()
    process.wait()
    until(lambda: [*sweep.text("stopped")] == POINTS[:2], "both are stopped")


@pytest.mark.parametrize("mode", [(), ("continue",)])
def test_a_point_that_is_cancelled_while_it_waits_never_starts(
    sweep: Sweep, mode: tuple[str, ...]
) -> None:
    sweep.start(*mode, "--most=1", "--cores=0")
    sweep.have_begun(POINTS[0])
    (sweep.folder / POINTS[2]).mkdir()
    (sweep.folder / POINTS[2] / "cancel_requested").touch()
    sweep.go()
    assert [*sweep.text("begun")] == [POINTS[0], POINTS[1], POINTS[3]]


def test_a_point_that_cannot_be_started_keeps_no_other_from_it(sweep: Sweep) -> None:
    sweep.folder.mkdir()
    (sweep.folder / POINTS[0]).write_text("a file where its folder is to be")
    sweep.start("--most=1")
    sweep.have_begun(POINTS[1])
    assert sweep.go() == 1
    assert [*sweep.text("begun")] == POINTS[1:]
    assert sweep.said.read_text().startswith(f"{POINTS[0]} cannot be started: ")


def test_who_continues_runs_what_has_not_succeeded(sweep: Sweep) -> None:
    sweep.start("--cores=0")
    sweep.have_begun(*POINTS)
    assert sweep.go() == 5
    for folder in (sweep.folder, sweep.folder / POINTS[1]):
        (folder / "cancel_requested").touch()
    (sweep.folder / "mended").touch()
    sweep.start("continue", "--cores=0")
    assert sweep.go() == 0
    begun = {point: len(text.splitlines()) for point, text in sweep.text("begun").items()}
    assert begun == {point: 2 if point == POINTS[1] else 1 for point in POINTS}
    assert sweep.text("begun")[POINTS[1]].splitlines()[1].split()[1:] == ["continue"]
    assert not list(sweep.folder.rglob("cancel_requested"))


def test_two_do_not_run_the_same_points(sweep: Sweep) -> None:
    first = sweep.start("--most=1", "--cores=0")
    sweep.have_begun(POINTS[0])
    second = sweep.start("continue", "--cores=0")
    assert second.wait(300) == 1
    assert sweep.said.read_text() == f"{sweep.folder}: its points run already\n"
    sweep.process = first
    assert sweep.go() == 5


@pytest.mark.parametrize("again", [False, True])
def test_a_point_that_starts_again_is_restarted_whoever_has_begun_it(
    again: bool, tmp_path: Path, until: Callable[..., None]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'cd "$1"; echo "${*:2}" >>modes; n=$(wc -l <modes); mkdir -p logs/attempt-$((n - 1))\n'
        '[ "$n" = 2 ] || { touch logs/attempt-$((n - 1))/start_again; exit 1; }\n'
    )
    argv = [sys.executable, "-m", "toolkit.supervisor", "points", str(tmp_path / "sweep")]
    argv += [*["continue"] * again, "--point=0000-a=1", "--", "bash", str(script)]
    assert subprocess.run(argv, check=False).returncode == 0
    modes = (tmp_path / "sweep/0000-a=1/modes").read_text().splitlines()
    assert modes == ["continue" if again else "", "restart"]


def test_signals_of_a_terminal_reach_the_points(sweep: Sweep) -> None:
    process = sweep.start("--cores=0")
    sweep.have_begun(*POINTS)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 3
    assert [*sweep.text("stopped")] == POINTS


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_points_folder_may_end_with_a_slash(tmp_path: Path, end: str) -> None:
    """As the shell completes it; the script would make a sweep within the point."""
    job = {"name": "probe", "command": ("true",), "sweep": {"grid": {"--lr": ("1", "2")}}}
    made = toolkit.plan(toolkit.JobSpec.model_validate(job), toolkit.LocalProfile(name="l"))
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$3 $4 $5"\n')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "run.sh").write_text(toolkit.render(made))
    argv = ["bash", str(tmp_path / "run.sh"), f"{tmp_path}/sw/0001-lr=2{end}", "continue"]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["local", f"{tmp_path}/sw/0001-lr=2"]
