"""A run directory that others may have written is shown, and nothing is done because of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import toolkit
from tests.conftest import TOOLKIT
from tests.fakes import fake_slurm
from toolkit.cli import cli
from toolkit.cli.summary import rows_of, summary_lines, summary_of
from toolkit.errors import LauncherError, ToolkitError
from toolkit.runs.records import registry
from toolkit.runs.records.provenance import origin_of
from toolkit.supervisor import run_lock

LOCAL = {"kind": "local", "name": "local", "runs_dir": "runs"}


def record(name: str, folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "uri": f"local://{name}",
        "name": name,
        "job": "probe",
        "profile": LOCAL,
        "created": 1.7e9,
        "run_dir": str(folder),
        **others,
    }


def add_run(tmp_path: Path, name: str = "probe-1") -> Path:
    """A run that has ended well, in the user's list."""
    run_dir = tmp_path / name
    attempt = run_dir / "logs/attempt-0"
    attempt.mkdir(parents=True)
    (attempt / "node-0.log").write_text("[rank 0] hello\n")
    (attempt / "exit_status").write_text("0\n")
    (run_dir / "outcome.json").write_text('{"status": "done", "attempt": 0}')
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    known = registry.parse(record(name, run_dir))
    assert known is not None
    registry.add(known)
    return run_dir


def forged(tmp_path: Path, **said: Any) -> Path:
    """A run directory of another user, whose run seems to be running."""
    run_dir = tmp_path / "theirs"
    (run_dir / "logs/attempt-0").mkdir(parents=True)
    (run_dir / "logs/attempt-0/node-0.log").write_text("[rank 0] from afar\n")
    (run_dir / "launch.json").write_text(json.dumps(record("theirs", run_dir, **said)))
    return run_dir


def program(*argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [TOOLKIT, *argv],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A PATH whose ssh, scancel, sbatch, squeue and kubectl only note that they were called."""
    folder, called = tmp_path / "tools", tmp_path / "called"
    folder.mkdir()
    for name in ("ssh", "rsync", "scancel", "sbatch", "squeue", "scontrol", "sacct", "kubectl"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{called}\nexit 1\n')
        (folder / name).chmod(0o755)
    yield f"{folder}:{os.environ['PATH']}", called


SLURM = {"kind": "slurm", "name": "far"}
KUBERNETES = {"kind": "kubernetes", "name": "far", "context": "prod-admin", "image": "a/b:1"}


@pytest.mark.parametrize(
    "said",
    [
        {"uri": "slurm://c/4711", "profile": SLURM},
        {"uri": "slurm://c/4711", "profile": {**SLURM, "via": "ssh eve@evil"}, "remote_dir": "/x"},
        {"uri": "k8s://default/theirs", "profile": KUBERNETES},
    ],
    ids=["slurm", "ssh", "kubernetes"],
)
def test_nobody_is_asked_stopped_or_connected_to(
    tmp_path: Path, tools: tuple[str, Path], said: dict[str, Any]
) -> None:
    path, called = tools
    run_dir = forged(tmp_path, **said)
    (run_dir / "jobs.jsonl").write_text('{"version": 1, "job_id": "4711", "points": null}\n')
    before = sorted(p.name for p in run_dir.rglob("*"))
    status = program("status", str(run_dir), PATH=path)
    assert status.returncode == 0 and "is not in your list of runs" in status.stdout
    assert "from afar" in program("logs", str(run_dir), PATH=path).stdout
    for command in ("cancel", "resubmit", "wait"):
        done = program(command, str(run_dir), PATH=path)
        assert done.returncode == 1 and "--trust believes" in done.stderr, done.stderr
    assert not called.exists()
    assert sorted(p.name for p in run_dir.rglob("*")) == before


def test_the_word_of_the_user_has_a_run_directory_believed(
    tmp_path: Path, tools: tuple[str, Path]
) -> None:
    path, called = tools
    run_dir = forged(tmp_path, uri="slurm://c/4711", profile=SLURM)
    program("status", "--trust", str(run_dir), PATH=path)
    assert "squeue" in called.read_text()


def test_a_run_directory_that_says_it_is_another_is_not(tmp_path: Path) -> None:
    own = add_run(tmp_path)
    run_dir = forged(tmp_path, uri="local://probe-1", run_dir=str(own))
    for trust in (False, True):
        assert toolkit.open_run(str(run_dir), trust=trust).run_dir == run_dir


def test_an_own_run_is_known_by_the_path_of_its_directory(tmp_path: Path) -> None:
    own = add_run(tmp_path)
    (own / "launch.json").write_text("{}")
    (tmp_path / "alias").symlink_to(own)
    for path in (own, tmp_path / "alias", own / "../probe-1/"):
        run = toolkit.open_run(str(path))
        assert run.record.believed and run.run_dir == own


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("said", ["-1", "0", "1", "other", "x", "9" * 30])
def test_no_process_is_stopped_but_an_own_supervisor(
    tmp_path: Path, said: str, trust: bool
) -> None:
    run_dir = forged(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with run_lock.hold(str(run_dir)):
            lock = run_dir / "running.lock"
            lock.write_text(str(other.pid) if said == "other" else said)
            run = toolkit.open_run(str(run_dir), trust=trust)
            if said in ("other", "1", "9" * 30) or not trust:
                with pytest.raises(LauncherError, match="is not"):
                    run.cancel()
            else:
                run.cancel()
        assert other.poll() is None
        assert not (run_dir / "cancel_requested").exists()
        other.communicate(b"\n")
        assert other.returncode == 0


READER = """
import fcntl, os, struct, sys
os.setuid(65534)
with open(sys.argv[1]) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    fcntl.lockf(lock, fcntl.LOCK_SH)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    print("locked", flush=True)
    input()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who becomes another user")
def test_who_may_read_a_run_cannot_make_it_run_on(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "job.yaml").write_text("name: a\nscript: t.py\n")
    (tmp_path / "t.py").write_text("print(1)\n")
    job = toolkit.load(tmp_path / "job.yaml")
    with contextlib.chdir(tmp_path):
        run = toolkit.run(job)
        assert run.wait().state is toolkit.RunState.SUCCEEDED
    assert run.run_dir is not None
    lock = run.run_dir / "running.lock"
    argv = [sys.executable, "-c", READER, str(lock)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdin and reader.stdout
        try:
            assert reader.stdout.readline() == "locked\n"
            assert run.status().state is toolkit.RunState.SUCCEEDED
            assert run.wait(5).state is toolkit.RunState.SUCCEEDED
            assert "has ended already" in program("cancel", run.name).stderr
            assert not (run.run_dir / "cancel_requested").exists()
            assert list(run.logs(follow=True)) == ["[rank 0] 1"]
        finally:
            reader.stdin.write("\n")
            reader.stdin.close()


def test_a_system_without_such_locks_has_flocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with (tmp_path / "running.lock").open("wb+") as other:
            assert not run_lock.is_held(other)
        (tmp_path / "running.lock").unlink()
        with run_lock.hold(str(tmp_path)), (tmp_path / "running.lock").open("rb") as asked:
            assert run_lock.is_held(asked)
            assert run_lock.is_held(asked)
        monkeypatch.setattr(run_lock, "_SET", -1)
        monkeypatch.setattr(run_lock, "_ASK", -1)


def test_what_a_run_writes_is_only_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\nscript: t.py\n")
    (tmp_path / "t.py").write_text("print(1)\n")
    command = f"umask 000; exec {TOOLKIT} run job.yaml"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    made = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(made) > 10
    assert [path for path in made if path.lstat().st_mode & 0o022 and not path.is_symlink()] == []


EMPTY_COMMAND_LINE = """
import ctypes, signal
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start and arg_end
line = ctypes.string_at(start, end - start)
ctypes.memset(start, 0, end - start)
print("empty", flush=True)
input()
ctypes.memmove(start, line, len(line))
signal.pause()
"""


def test_a_supervisor_that_was_started_this_instant_is_stopped(tmp_path: Path) -> None:
    run_dir = forged(tmp_path)
    argv = [sys.executable, "-c", EMPTY_COMMAND_LINE, "toolkit.supervisor", str(run_dir)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as supervisor,
        run_lock.hold(str(run_dir)) as lock,
        ThreadPoolExecutor() as threads,
    ):
        assert supervisor.stdin and supervisor.stdout
        run_lock.note_pid(lock, supervisor.pid)
        assert supervisor.stdout.readline() == "empty\n"
        cancelled = threads.submit(toolkit.open_run(str(run_dir), trust=True).cancel)
        with contextlib.suppress(TimeoutError):  # it waits for the command line
            cancelled.result(timeout=0.5)
        supervisor.stdin.write("\n")
        supervisor.stdin.flush()
        cancelled.result()
        assert supervisor.wait() == -signal.SIGTERM


DEEP = "[" * 200_000


def fifo(name: str) -> Callable[[Path], None]:
    def poison(run_dir: Path) -> None:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)

    return poison


def link(name: str, to: str) -> Callable[[Path], None]:
    def poison(run_dir: Path) -> None:
        path = run_dir / name
        if path.is_dir():
            path.rename(path.with_name("moved"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(to)

    return poison


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def poison(run_dir: Path) -> None:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return poison


FILES = [
    "outcome.json",
    "job.yaml",
    "metrics.jsonl",
    "running.lock",
    "launch.json",
    "jobs.jsonl",
    "cancel_requested",
    "logs/launcher.log",
    "logs/attempt-0/reason",
    "logs/attempt-0/log",
    "logs/attempt-0/exit_status",
    "logs/attempt-0/node-0.log",
    "logs/attempt-0/nodes",
    "logs/attempt-0/node-0/run/attempt_0/0/error.json",
    "logs/attempt-0/node-0/run/attempt_0/0/stderr.log",
]
RANK = "logs/attempt-0/node-0/run/attempt_0/0"
ERROR = '{"message": {"message": "m", "extraInfo": {"timestamp": %s, "py_callstack": "x"}}}'
POISONS: dict[str, Callable[[Path], None]] = {
    **{f"fifo {name}": fifo(name) for name in FILES},
    **{f"zero {name}": link(name, "/dev/zero") for name in FILES},
    **{f"loop {name}": link(name, Path(name).name) for name in FILES},
    **{f"deep {name}": text(name, DEEP) for name in FILES},
    **{f"bytes {name}": text(name, b"\xff\xfe\x00{") for name in FILES},
    **{f"number {name}": text(name, "9" * 6000) for name in FILES},
    "attempt-x": text("logs/attempt-x/reason", "x"),
    "attempt-0.bak": text("logs/attempt-0.bak/reason", "x"),
    "attempt-9…": text(f"logs/attempt-{'9' * 200}/reason", "x"),
    "attempt_x": text("logs/attempt-0/node-0/run/attempt_x/0/error.json", "{}"),
    "logs is a link": link("logs", "/etc"),
    "logs is a loop": link("logs", "logs"),
    "a node is a link": link("logs/attempt-0/node-1", "/"),
    "secrets number": text("job.yaml", "secrets: 5\n"),
    "secrets odd": text("job.yaml", "secrets: {T: {file: 5}, 6: {file: x}}\n"),
    "secrets zero": text("job.yaml", "secrets: {T: {file: /dev/zero}}\n"),
    "secrets list": text("job.yaml", "secrets: [{}, [], 3]\n"),
    "secrets NUL": text("job.yaml", 'secrets: {T: {file: "a\\0b"}}\n'),
    "secrets nobody": text("job.yaml", "secrets: {T: {file: ~nobody-such/x}}\n"),
    "half a character": text("outcome.json", r'{"status": "fatal", "reason": "\ud800"}'),
    "outcome types": text("outcome.json", '{"status": [], "attempt": {}, "step": [], "reason": 5}'),
    "outcome huge": text("outcome.json", f'{{"status": "running", "attempt": {"9" * 4000}}}'),
    "metrics types": text("metrics.jsonl", '{"step": 1, "loss": {"a": []}}\n{"step": 1e400}\n'),
    "note negative": text("logs/attempt-0/log", "-5 /etc/passwd\n"),
    "note NUL": text("logs/attempt-0/log", "0 a\0b\n"),
    **{
        f"time {stamp}": text(f"{RANK}/error.json", ERROR % stamp)
        for stamp in ("1e20", "Infinity", "NaN", "-1e20", '"x"', "[]", "1" * 400)
    },
    "error types": text(f"{RANK}/error.json", '{"message": [1]}'),
}


@pytest.mark.parametrize("name", POISONS)
def test_an_odd_run_directory_takes_nothing_from_the_other_runs(tmp_path: Path, name: str) -> None:
    odd, good = add_run(tmp_path, "odd-1"), add_run(tmp_path, "good-1")
    if not name.startswith(("zero", "fifo")) or "outcome" not in name:
        (odd / "outcome.json").write_text('{"status": "fatal", "attempt": 0, "reason": "r"}')
        (odd / "logs/attempt-0/exit_status").write_text("1\n")
    (odd / "running.lock").touch()
    POISONS[name](odd)
    for brief in (False, True):
        rows = rows_of(toolkit.list_runs(), brief=brief)
        assert [row["name"] for row in rows] == ["odd-1", "good-1"]
        assert rows[1]["state"] == "SUCCEEDED"
        json.dumps(rows, ensure_ascii=False).encode()
    for trust in (False, True):
        run = toolkit.open_run(str(odd), trust=trust)
        for part in summary_lines(summary_of(run)):
            part.encode()
        asked: tuple[Callable[[], object], ...] = (
            partial(list, run.logs()),
            partial(origin_of, run),
            *(run.failure, run.metrics, run.goodput, run._repr_html_),
            lambda run=run: run.report().html,
        )
        for ask in asked:
            try:
                shown = str(ask())
            except LauncherError as error:
                shown = str(error)
            assert "root:" not in shown
    assert "hello" in next(iter(toolkit.open_run(str(good)).logs()))


def test_no_file_outside_is_shown_as_a_log(tmp_path: Path) -> None:
    run_dir = forged(tmp_path)
    (tmp_path / "id_rsa").write_text("PRIVATE KEY\n")
    note = run_dir / "logs/attempt-0/log"
    (tmp_path / "link").symlink_to("id_rsa")
    for named in (tmp_path / "link", run_dir / "../id_rsa", Path("/etc/hostname")):
        note.write_text(f"0 {named}\n")
        note.chmod(0o666)
        assert "PRIVATE" not in program("logs", str(run_dir)).stdout
    note.unlink()
    (run_dir / "logs/job.log").symlink_to(tmp_path / "id_rsa")
    assert "PRIVATE" not in program("logs", str(run_dir)).stdout


ODD_RECORDS: list[dict[str, Any]] = [
    {"created": None},
    {"created": "x"},
    {"created": 1e300},
    {"profile": None},
    {"profile": {"kind": "local", "a_key_of_tomorrow": 1}},
    {"profile": {"kind": "tomorrow"}},
    {"run_dir": "a\0b"},
    {"run_dir": 5},
    {"job": ["x"]},
    {"version": 2},
    {"uri": "slurm://c/not a job\x1b[2J", "profile": SLURM},
    {"uri": "slurm://", "profile": SLURM},
    {"uri": "k8s://x", "profile": KUBERNETES},
]


def test_odd_records_get_a_line_each_and_the_others_theirs(
    tmp_path: Path, own_user: Path, tools: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(tmp_path)
    names = {f"odd-{number}": odd for number, odd in enumerate(ODD_RECORDS)}
    listed = own_user / "state/torch-deploy-toolkit/runs.jsonl"
    with listed.open("ab") as file:
        file.write(b"\xff\xfe{\n" + b"[" * 200_000 + b"\n{}\n3\nnull\n")
        for name, odd in names.items():
            file.write(json.dumps(record(name, tmp_path / name, **odd)).encode() + b"\n")
    add_run(tmp_path, "last-1")
    for argv in (["list"], ["list", "--json"]):
        done = program(*argv, PATH=tools[0])
        assert done.returncode == 0, done.stderr
        assert "probe-1" in done.stdout and "last-1" in done.stdout
        assert "\x1b" not in done.stdout
    shown = set(re.findall(r"odd-\d+", program("list", PATH=tools[0]).stdout))
    no_uri = {name for name, odd in names.items() if "\x1b" in str(odd.get("uri"))}
    assert shown == names.keys() - no_uri
    monkeypatch.setenv("PATH", tools[0])
    for name in names:
        failed = CliRunner().invoke(cli, ["status", name]).exception
        assert failed is None or isinstance(failed, (SystemExit, ToolkitError)), name


def test_a_terminal_is_not_commanded_by_a_log(tmp_path: Path) -> None:
    run_dir = add_run(tmp_path)
    log = run_dir / "logs/attempt-0/node-0.log"
    log.write_text("\x1b]52;c;aGk=\x07\x1b]0;t\x07\x9b31m \x1b[2Jend\n")
    (run_dir / "outcome.json").write_text(
        json.dumps({"status": "fatal", "attempt": 0, "reason": "\x1b]0;title\x07why"})
    )
    (run_dir / "logs/attempt-0/exit_status").write_text("1\n")
    for argv in (["logs", "probe-1"], ["status", "probe-1"], ["list"]):
        done = program(*argv)
        assert not set("\x1b\x07\x9b") & set(done.stdout + done.stderr)
    assert r"\x1b]0;title\x07why" in program("list").stdout


def test_a_new_run_directory_is_for_its_owner_to_write_whatever_the_umask(tmp_path: Path) -> None:
    from toolkit.runs.records import run_directory

    before = os.umask(0)
    try:
        run_dir = run_directory.make(tmp_path / "runs", "one")
        job = toolkit.JobSpec(name="probe", module="train")
        run_directory.write_inputs(
            run_dir, job, script="#!/bin/bash\n", file_name="run.sh", files={"a/b": b"c"}
        )
        known = registry.parse(record("one", run_dir))
        assert known is not None
        registry.add(known)
        run_directory.request_cancel(run_dir)
        at = time.time() - 100
        os.utime(run_dir / "cancel_requested", (at, at))
        run_directory.request_cancel(run_dir)
    finally:
        os.umask(before)
    assert (run_dir / "cancel_requested").stat().st_mtime > at + 50
    made = [run_dir.parent, run_dir, *run_dir.rglob("*")]
    assert len(made) == 9
    assert [path for path in made if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("site", [toolkit.LocalProfile(), toolkit.SlurmProfile()])
def test_what_a_script_makes_is_for_its_owner_to_write_whatever_the_umask(
    site: toolkit.Profile, tmp_path: Path
) -> None:
    job, run_dir = toolkit.JobSpec(name="probe", module="train"), tmp_path / "run"
    before = os.umask(0)
    try:
        fake_slurm.execute(
            toolkit.render(toolkit.plan(job, site)), tmp_path, nodes=1, run_dir=run_dir
        )
    finally:
        os.umask(before)
    made = [run_dir, *run_dir.rglob("*")]
    assert len(made) > 4
    assert [path for path in made if path.stat().st_mode & 0o022] == []
