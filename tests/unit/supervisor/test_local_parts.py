"""Parts of an attempt on this machine; tests/system/test_local_launcher.py plays whole ones."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from toolkit.local.launcher import LocalLauncher
from toolkit.supervisor import __main__ as command_line
from toolkit.supervisor.attempt import Refused, open_attempt
from toolkit.supervisor.evidence.files import last_lines, read
from toolkit.supervisor.evidence.outcome import Outcome
from toolkit.supervisor.evidence.restarts import after_restarts
from toolkit.supervisor.evidence.torchrun_report import has_exitcode, report_lines
from toolkit.supervisor.local import free_port, visible_devices
from toolkit.supervisor.notify import MOST_TEXT, masked, printable
from toolkit.supervisor.policy import Made
from toolkit.supervisor.process import Children, status_of
from toolkit.supervisor.supervised import lost_since, secret_in


def test_attempts_are_numbered_and_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    first = open_attempt(run_dir, "")
    first.write("reason", "retryable: so")
    first.write("step", "7")
    with pytest.raises(Refused, match="already holds a run; to go on with it: bash FILE"):
        open_attempt(run_dir, "")
    second = open_attempt(run_dir, "restart")
    assert (second.number, second.since) == (1, 0)
    assert second.made("lost", None) == [Made("retryable", 7), Made("lost", None)]
    third = open_attempt(run_dir, "continue")
    assert (third.number, third.since, third.best_before()) == (2, 2, 0)
    assert third.made("lost", 3) == [Made("lost", 3)]


@pytest.mark.parametrize("content", ["", "many\n", "\x00" * 9999, "-3", "9" * 50])
def test_what_an_attempt_has_left_may_be_anything(tmp_path: Path, content: str) -> None:
    run_dir = str(tmp_path)
    first = open_attempt(run_dir, "")
    for name in ("since", "step", "reason"):
        Path(first.path(name)).write_text(content)
    second = open_attempt(run_dir, "restart")
    assert second.made("lost", None)[-1] == Made("lost", None)


def test_a_secret_is_read_from_a_file_that_nobody_else_may_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, mode, message in (
        (None, 0, "cannot read"),
        ("x\n", 0o644, "others may read .*; chmod 600 it"),
        ("\n", 0o600, "is empty"),
    ):
        if content is not None:
            path.write_text(content)
            path.chmod(mode)
        with pytest.raises(ValueError, match=message):
            secret_in(str(path))
    path.write_text("two\nlines\n\n")
    assert secret_in(str(path)) == "two\nlines"


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Somebody else may have put it there."""
    pipe = tmp_path / "reason"
    os.mkfifo(pipe, 0o600)
    assert (read(str(pipe)), last_lines(str(pipe)), report_lines([str(pipe)])) == ("", [], [])
    with pytest.raises(ValueError, match="cannot read"):
        secret_in(str(pipe))


def test_gpus_are_counted_over_those_that_the_user_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert [visible_devices(own) for own in ("", "0", "1,0", "2")] == ["", "4", "GPU-7,4", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices("1,3") == "1,3"


def test_a_port_on_which_somebody_listens_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert taken not in {free_port(taken - 1, 2) for _ in range(20)}


def test_a_text_is_ascii_and_holds_no_secret() -> None:
    assert printable("a\tb\x1b[1m é \udcff") == "a?b?[1m ?? ?"
    assert len(printable("x" * 5000)) == MOST_TEXT
    secrets = {"TOKEN": "s3cret", "SHORT": "abc"}
    assert masked("s3cret abc", ["TOKEN", "SHORT", "NONE"], secrets) == "***TOKEN*** abc"


def test_a_report_is_found_in_any_log(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    block = "Root Cause (first observed failure):\n  time      : x\n  exitcode  : 93 (pid: 7)\n"
    log.write_bytes(b"\xff" * 300_000 + b"\nexitcode: 2\n" + block.encode())
    lines = report_lines([str(log), str(tmp_path / "none")])
    assert lines == block.splitlines()
    assert has_exitcode(lines, 93)
    assert not has_exitcode(lines, 9)


def test_restarts_of_all_nodes_are_counted_once(tmp_path: Path) -> None:
    for node, start, time_s in ((0, 0, 100), (1, 0, 103), (0, 1, 200), (1, 1, 204), (0, 2, 206)):
        folder = tmp_path / f"logs/attempt-0/node-{node}/7_x/attempt_{start}"
        folder.mkdir(parents=True)
        os.utime(folder, (time_s, time_s))
    log = tmp_path / "node-0.log"
    log.write_text(
        "E1128 10:00:00 failed (exitcode: 3) local_rank: 1 (pid: 5)\n"
        "E1128 10:00:09 failed (exitcode: -9) local_rank: 0 (pid: 6)\n"
    )
    told = after_restarts(str(tmp_path), 0, [str(log)])
    assert told == ", after 2 restarts, the last: local rank 0: killed by SIGKILL"
    log.write_text("")
    (tmp_path / "logs/attempt-0/reason").write_text("walltime: out of time; started again\n")
    assert after_restarts(str(tmp_path), 1, [str(log)]).endswith("the last: walltime: out of time")


def test_the_first_failure_stops_the_others_and_one_that_does_not_stop_is_killed(
    tmp_path: Path,
) -> None:
    children, log = Children(pause_s=0), tmp_path / "log"
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    deaf += "while True: signal.pause()"
    children.start([sys.executable, "-c", deaf], str(log), os.environ)
    process = children.running[0]
    while "up" not in log.read_text():
        assert children.look()
    children.start(["sh", "-c", "exit 7"], str(log), os.environ)
    while children.look():
        pass
    assert children.status == 7
    assert status_of(process.returncode) == 128 + signal.SIGKILL


def test_a_command_line_without_torchrun_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["local", "run", "--job=j", "--devices="])
    assert ended.value.code == 2
    assert "torchrun and its arguments must follow a '--'" in capsys.readouterr().err


def test_a_signal_between_two_attempts_ends_the_run(tmp_path: Path) -> None:
    """The script has ended, and would be started again."""
    script = tmp_path / "run.sh"
    script.write_text(
        "trap '' TERM; mkdir -p $1/logs/attempt-0; touch $1/logs/attempt-0/start_again\n"
        'echo "$@" >>$1/started; kill -TERM $PPID; exit 1\n'
    )
    (tmp_path / "run").mkdir()
    argv = ["keep", str(tmp_path / "run"), "--", "bash", str(script), str(tmp_path / "run")]
    command = [sys.executable, "-m", "toolkit.supervisor", *argv]
    assert subprocess.run(command, check=False).returncode == 1
    assert (tmp_path / "run/started").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("checkpoints", "lost"),
    [
        (["attempt-0/step-00000400", "attempt-0/step-00000438"], "2 steps after the newest"),
        (["attempt-0/step-00000438", "attempt-1"], "2 steps after the newest"),
        (["step-00000430", "step-00000440.tmp", ".step-00000439"], "10 steps after the newest"),
        (["step=430"], "10 steps after the newest"),
        (["checkpoint_3", "epoch-7", "last.ckpt"], ""),
        (["step-00000450"], ""),
        ([], ""),
    ],
)
def test_the_cost_of_a_failure_is_counted_from_the_newest_whole_checkpoint(
    tmp_path: Path, checkpoints: list[str], lost: str
) -> None:
    for at, name in enumerate(checkpoints):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        os.utime(folder, (at, at))
    said = lost_since(Outcome(status="retryable", step="440"), str(tmp_path))
    assert said == (f", at step 440, {lost} checkpoint" if lost else "")


def test_a_point_is_continued_by_the_script_of_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = toolkit.LocalProfile(name="l", runs_dir=str(tmp_path))
    launcher = LocalLauncher(profile)
    monkeypatch.setattr(launcher, "_supervise", lambda run_dir, plan: None)
    job = {"name": "probe", "command": ("true",), "sweep": {"grid": {"--lr": ("1", "2")}}}
    run = launcher.submit(toolkit.plan(toolkit.JobSpec.model_validate(job), profile))
    with pytest.raises(toolkit.LauncherError) as error:
        launcher.resubmit(run.points[1])
    script, folder, mode = str(error.value).partition(": bash ")[2].split()
    assert (Path(script).is_file(), folder, mode) == (True, str(run.points[1].run_dir), "continue")
