"""`toolkit check` tells what `toolkit run` refuses, in the same words; and what `train` refuses."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolkit.cli.main import main

Toolkit = Callable[..., tuple[int, str]]

GPUS = "resources: {nnodes: 2, nproc_per_node: 9, gpus_per_node: 9}"
REFUSED: dict[str, tuple[str, str]] = {
    "GPUs": (GPUS, "18 GPUs are needed (2 x 9), and this machine has 2; "),
    "workers": (
        "resources: {gpus_per_node: 1, nproc_per_node: 2}",
        "nproc_per_node 2 exceeds gpus_per_node 1; ",
    ),
    "nodes": ("resources: {nnodes: 5000}", "5000 simulated nodes with 1 workers or GPUs each"),
    "switch": ("args: [--x, 1]\nsweep: {grid: {--x: [true, false]}}", "--x is true or false in"),
    "twice": ("sweep: {grid: {--x: [a, a]}}", "points 0 and 1 set the same; leave one out"),
    "script": ("module: null\nscript: nowhere.py", "script: no file 'nowhere.py' in '"),
    "workdir": (
        "module: null\nscript: here.py\nworkdir: /usr",
        "script: no file 'here.py' in '/usr'",
    ),
    "secret": ("secrets: [NOWHERE, NEITHER]", "secrets are not set here: NOWHERE, NEITHER; "),
    "secret file": ("secrets: {A: {file: /proc/version}}", "others may read /proc/version; chmod"),
    "secret in args": ("args: [--token, hf_a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6e7]", "secret"),
    "mount": ("mounts: [{source: /a, target: /b}]", "runs without containers, so '/a' cannot"),
    "claim": ("mounts: [{source: 'claim:a', target: /b}]", "exists only on Kubernetes"),
    "after": ("after: [probe-1]", "after: only Slurm lets a job wait for another"),
    "elastic": ("resources: {nnodes: {min: 1, max: 2}}", "needs retries.in_job"),
    "stop": ("stop: {grace: 5m}\ntime_limit: 5m", "stop.grace 5m does not fit"),
    "stall": ("stall_timeout: never\nlog_pattern: '(?P<step>x)'", "log_pattern needs the"),
    "notify": ("notify: {webhook: $HOOK}", "notify.webhook is $HOOK, which is not a secret of"),
    "key": ("nnode: 1", "unknown key 'nnode'"),
    "none": ("module: null", "give one of module, script and command"),
}
"""Lines of a job file, and a part of what `run` says."""


@pytest.fixture
def toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Toolkit:
    """Call the program in a folder; its exit status, and all that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "here.py").touch()

    def call(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["toolkit", *argv])
        with pytest.raises(SystemExit) as end:
            main()
            sys.exit(0)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out + err

    return call


def job_file(lines: str) -> str:
    kept = [] if "module:" in lines else ["module: mine"]
    lines = lines.replace("module: null", "")
    Path("job.yaml").write_text("\n".join(["name: probe", *kept, lines, ""]))
    return "job.yaml"


@pytest.mark.parametrize("case", REFUSED)
def test_check_prints_what_run_refuses(case: str, toolkit: Toolkit) -> None:
    lines, words = REFUSED[case]
    file = job_file(lines)
    status, refusal = toolkit("run", file)
    assert status in (1, 2) and words in refusal
    messages = [
        re.sub(r"^(job\.yaml:\d+|job\.yaml|args\[\d+\]): ", "", line)
        for line in refusal.splitlines()
    ]
    status, found = toolkit("check", file, "--to", "local")
    assert status in (1, 2)
    assert [one for one in messages if one.strip() not in found] == []
    status, noted = toolkit("check", file)
    assert [one for one in messages if one.strip() not in noted] == []
    assert "fine" not in noted or "note: `toolkit run` refuses it here: " in noted


def test_a_job_that_runs_here_has_no_such_note(toolkit: Toolkit) -> None:
    file = job_file("resources: {nproc_per_node: 2}")
    assert toolkit("check", file) == (0, "job.yaml: fine: 1 x 2 processes\n")
    assert toolkit("check", file, "--to", "local")[0] == 0


# ---- The arguments of `train`

WRONG = {
    "flag": ("--epoch 3", "unknown flag '--epoch'; did you mean '--epochs'?"),
    "choice": ("--precision fp8", "--precision: unknown precision 'fp8'"),
    "number": ("--steps many", "--steps 'many' is not a whole number"),
    "missing": ("--lr", "--lr needs a value"),
    "both": ("--steps 3 --epochs 3", "--steps and --epochs both say when to end"),
    "mesh": ("--strategy fsdp --dp-shard 3", "3"),
    "task": ("--task digit", "unknown task 'digit'; did you mean 'digits'?"),
    "file": ("--task mine.py:Mine", "/mine.py does not exist"),
    "config": ("--config none.toml", "--config none.toml: No such file or directory"),
    "key": ("--config some.toml", "some.toml:1: unknown key 'epoch'; did you mean 'epochs'?"),
}


STARTED = {
    "RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "TRAIN_RUN_DIR": "run",
}
"""What torchrun and the script set."""


@pytest.mark.parametrize("case", WRONG)
def test_check_prints_what_train_refuses(case: str, toolkit: Toolkit) -> None:
    argv, words = WRONG[case]
    Path("some.toml").write_text("epoch = 3\n")
    file = job_file(f"module: train\nargs: [{argv.replace(' ', ', ')}]")
    status, found = toolkit("check", file, "--to", "local")
    assert status == 1
    (line,) = found.splitlines()
    _, rule, message = line.partition("[train-arguments] args: ")
    assert rule and words in message
    done = subprocess.run(
        [sys.executable, "-m", "train", *argv.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), **STARTED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"train: {message}"])
    elsewhere = case in ("file", "config")
    assert toolkit("check", file)[0] == (0 if elsewhere else 1), "files may be where it runs"


def test_flags_beside_a_configuration_that_is_elsewhere_are_read(toolkit: Toolkit) -> None:
    os.mkfifo("pipe")
    for path in ("/etc/passwd", "none.toml", "pipe"):
        file = job_file(f"module: train\nargs: [--config, {path}, --epoch, '3', --lr=high]")
        status, found = toolkit("check", file)
        assert status == 1
        assert [line.partition("args: ")[2] for line in found.splitlines()] == [
            "unknown flag '--epoch'; did you mean '--epochs'?",
            "--lr 'high' is not a number",
        ]


def test_each_point_of_a_sweep_is_read_and_a_problem_of_all_is_told_once(toolkit: Toolkit) -> None:
    file = job_file(
        "module: train\nargs: [--epoch, 3]\nsweep: {grid: {--lr: ['1', high], --seed: [0, 1]}}"
    )
    status, found = toolkit("check", file)
    assert status == 1
    assert [line.partition("args: ")[2] for line in found.splitlines()] == [
        "unknown flag '--epoch'; did you mean '--epochs'?",
        "point 2 and 1 more: --lr 'high' is not a number",
    ]


@pytest.mark.parametrize("own", ["train.py", "train/__init__.py"])
def test_a_train_of_the_projects_own_is_neither_asked_nor_imported(
    own: str, toolkit: Toolkit
) -> None:
    for path in (own, "json.py"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("open('imported', 'w')\n")
    file = job_file("module: train\nargs: [--epoch, 3]")
    assert toolkit("check", file)[0] == 0
    status, found = toolkit("check", file, "--verify")
    assert status == 1 and f"the job starts that in {Path.cwd()}" in found
    assert not Path("imported").exists()


@pytest.mark.parametrize("of", ["the job", "the user"])
def test_a_train_that_the_path_leads_to_is_neither_asked_nor_imported(
    of: str, toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine").mkdir()
    Path("mine/train.py").write_text("open('imported', 'w')\n")
    mine = Path("mine").resolve()
    if of == "the user":
        monkeypatch.setenv("PYTHONPATH", str(mine))
    env = "\nenv: {PYTHONPATH: mine}" if of == "the job" else ""
    file = job_file(f"module: train\nargs: [--epoch, 3]{env}")
    assert toolkit("check", file)[0] == 0
    status, found = toolkit("check", file, "--verify")
    assert status == 1 and f"the job starts that in {mine}" in found
    assert not Path("imported").exists()


def test_a_train_that_another_path_may_hold_is_not_asked(toolkit: Toolkit) -> None:
    file = job_file("module: train\nargs: [--mine, 3]\nenv: {PYTHONPATH: /mine}")
    assert toolkit("check", file)[0] == 0
    assert toolkit("check", job_file("module: train\nargs: [--help]"))[0] == 0


def test_arguments_that_take_long_to_judge_end_the_question(
    toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.local.train_arguments._TIMEOUT_S", 0.01)
    assert toolkit("check", job_file("module: train\nargs: [--epoch, 3]"))[0] == 0


MEAN = """
import torch
from train.data.order import Batch
from train.tasks.base import Task


class Mean(Task):
    def model(self):
        return torch.nn.Linear(3, 1)

    def train(self):
        return Batch(inputs=torch.arange(24.0).reshape(8, 3), targets=torch.ones(8, 1))

    def test(self):
        return self.train()

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()
"""


def test_verify_proves_a_job_here(toolkit: Toolkit) -> None:
    Path("mean.py").write_text(MEAN)
    file = job_file("module: train\nargs: [--task, 'mean.py:Mean', --micro-batch, 2]")
    assert toolkit("check", file, "--to", "local")[0] == 0
    status, found = toolkit("check", file, "--to", "local", "--verify")
    assert status == 1
    assert re.match(
        r"job\.yaml:3: \[train-arguments\] args: .*the mean over the samples, not", found
    )
    whole = job_file("module: train\nargs: [--task, 'mean.py:Mean']")
    assert toolkit("check", whole, "--to", "local", "--verify")[0] == 0
    many = job_file("module: train\nresources: {nproc_per_node: 32}\nargs: [--global-batch, 64]")
    assert "at most 16, not 32; prove a smaller" in toolkit("check", many, "--verify")[1]
    status, found = toolkit("check", job_file(""), "--verify")
    assert status == 1 and "--verify proves only jobs with `module: train`" in found


@pytest.mark.slow
def test_verify_starts_the_ranks_of_a_job(toolkit: Toolkit) -> None:
    Path("mean.py").write_text(MEAN)
    whole = job_file("module: train\nargs: [--task, 'mean.py:Mean']")
    assert toolkit("check", whole, "--to", "local", "--verify")[0] == 0
    two = "module: train\nresources: {nproc_per_node: 2}\nargs: [--task, 'mean.py:Mean'"
    assert "2 shards" in toolkit("check", job_file(f"{two}]"), "--verify")[1]
    accepted = job_file("module: train\nresources: {nproc_per_node: 2}\nargs: [--tp, 2]")
    assert toolkit("check", accepted, "--verify")[0] == 0
