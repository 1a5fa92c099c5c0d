"""Odd job files, scripts, manifests, run directories, states and answers end in a message."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit
from tests.conftest import ROOT
from tests.security.fuzzing import CANARY, as_text, deep, fuzz, guarded, mutated, torn
from tests.support.asked_slurm import ACCOUNTED, CONFIG, job_row, squeue
from toolkit import checks
from toolkit.cli.summary import goodput_lines, rows_of, summary_lines, summary_of
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile
from toolkit.runs.records import registry, run_directory
from toolkit.runs.records.provenance import origin_lines, origin_of
from toolkit.slurm import SlurmLauncher

PROFILES: tuple[Profile, ...] = (
    LocalProfile(name="local"),
    SlurmProfile(name="s"),
    KubernetesProfile(name="k"),
)
JOBS = [
    {
        "name": "probe",
        "script": "train.py",
        "args": ["--lr", "0.1"],
        "image": "registry.example/train:1",
        "resources": {"nnodes": "2:4", "gpus_per_node": 8, "memory": "64GiB", "time": "2h"},
        "env": {"A": "b"},
        "secrets": {"HF_TOKEN": {"file": "~/.token"}, "WANDB": {"secret": "s", "key": "k"}},
        "mounts": ["/data:/data:ro"],
        "retries": {"in_job": 1, "requeue": 2},
        "stop": {"grace": "60s"},
        "sbatch": {"comment": "x", "exclusive": True},
        "after": ["other:any"],
    },
    {
        "name": "sweep",
        "module": "train",
        "sweep": {"grid": {"--lr": ["0.1", "0.2"], "env.SEED": ["1", "2"]}, "max_parallel": 2},
        "resources": {"nnodes": 1},
        "kubernetes": {"workload": "JobSet", "patches": [{"target": {"kind": "Pod"}, "patch": {}}]},
    },
    {"name": "words", "command": ["python", "-c", "print(1)"], "workdir": "/work", "venv": ".venv"},
]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_job_files(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    known = [*JOBS, *(yaml.safe_load(p.read_text()) for p in sorted((ROOT / "jobs").glob("*.y*")))]

    def attack(rng: random.Random) -> None:
        document = rng.choice(known)
        if rng.random() < 0.3:
            path.write_bytes(torn(rng, yaml.safe_dump(document).encode()))
        else:
            text = as_text(rng, mutated(rng, document))
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with guarded():
            for finding in toolkit.check(path, to=[rng.choice(PROFILES)]):
                str(finding).encode()

    fuzz(attack, again=[166987325611])


@pytest.mark.slow
def test_batch_scripts(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    known = [
        p.read_bytes() for p in sorted((ROOT / "tests/data/scripts").rglob("*")) if p.is_file()
    ]
    known = [text for text in known if len(text) < 20_000]
    assert len(known) > 5

    def attack(rng: random.Random) -> None:
        text = torn(rng, rng.choice(known))
        path.write_bytes(text if rng.random() < 0.9 else b"#!/bin/bash\n" + text)
        with guarded():
            for finding in toolkit.check(path):
                str(finding).encode()

    fuzz(attack)


@pytest.mark.slow
def test_manifests(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    files = [
        *(ROOT / "k8s/examples").rglob("*.yaml"),
        *(ROOT / "tests/data/manifests").rglob("*.yaml"),
    ]
    known = [p.read_text() for p in sorted(files) if p.stat().st_size < 30_000]
    assert len(known) > 5

    def attack(rng: random.Random) -> None:
        text = rng.choice(known)
        if rng.random() < 0.4:
            path.write_bytes(torn(rng, text.encode()))
        else:
            documents = [d for d in yaml.safe_load_all(text) if isinstance(d, dict)]
            made = [as_text(rng, mutated(rng, d)) for d in documents]
            path.write_text("\n---\n".join(made), encoding="utf-8", errors="surrogatepass")
        with guarded():
            for finding in toolkit.check(path):
                str(finding).encode()

    fuzz(attack)


# ---- What a run has left behind

ERROR = {
    "message": {"message": "boom", "extraInfo": {"timestamp": "1700000000", "py_callstack": ""}}
}
REPORT = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
  traceback : To enable traceback see
"""
RANK = "logs/attempt-0/node-0/run/attempt_0/0"
LEFT: dict[str, Any] = {
    "outcome.json": {"status": "fatal", "attempt": 0, "reason": "r", "steps": 9, "step": 3},
    "metrics.jsonl": {"step": 1, "loss": 0.5, "attempt": 0, "restart": 0},
    "jobs.jsonl": {"version": 1, "job_id": "77", "mode": "", "points": None, "after": ""},
    "points.jsonl": {"version": 1, "index": 0, "name": "p0", "settings": {"--lr": "0.1"}},
    "launch.json": {
        **{"version": 1, "uri": "local://x", "name": "x", "job": "j", "profile": {}},
        "provenance": {"toolkit": "0.1", "git": {"commit": "c", "dirty": True, "diff": "+a"}},
    },
    "events.jsonl": {
        **{"time": 1.7e9, "attempt": 0, "restart": 0, "event": "environment", "torch": "2"},
        **{"nodes": [{"host": "n", "ranks": 1}], "packages_differ": [], "began": 1.6e9},
        **{"phases": {"imports": 3.0}, "global_batch": 8, "seconds": 1.0},
    },
    "job.yaml": {"name": "probe", "script": "x.py", "secrets": {"T": {"file": "x"}}},
    f"{RANK}/error.json": ERROR,
    f"{RANK}/stderr.log": "Traceback (most recent call last):\n  File x, line 1\nValueError: no\n",
    "logs/attempt-0/reason": "fatal: r",
    "logs/attempt-0/exit_status": "1\n",
    "logs/attempt-0/nodes": "node1\n",
    "logs/attempt-0/node-0.log": f"[rank 0] hello\n{REPORT}",
    "logs/attempt-0/log": "0 /run/logs/job.log\n",
    "logs/job.log": REPORT,
    "logs/launcher.log": "said\n",
    "running.lock": "0000004711",
    "cancel_requested": "",
}
NAMES = ["attempt-x", "attempt-1", "attempt-0.bak", f"attempt-{'9' * 50}", "attempt-01", "é", "-"]


def leave(rng: random.Random, run_dir: Path, outside: Path) -> None:
    """Make a run directory with a few odd files."""
    wanted = [name for name in LEFT if rng.random() < 0.6]
    for name in wanted:
        path = run_dir / name
        if any(p.is_symlink() or p.is_file() for p in path.parents if p != run_dir):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = LEFT[name]
        match rng.randrange(12):
            case 0:
                path.symlink_to(rng.choice([str(outside), "/dev/zero", path.name, "/", "../.."]))
            case 1:
                os.mkfifo(path)
            case 2:
                path.mkdir()
            case 3:
                path.write_text(deep())
            case 4 | 5:
                text = content if isinstance(content, str) else json.dumps(content)
                path.write_bytes(torn(rng, text.encode()))
            case 6 | 7 if not isinstance(content, str):
                path.write_text(json.dumps(mutated(rng, content)))
            case 8 if name == "logs/attempt-0/log":
                path.write_text(f"{rng.choice([0, -5, 3])} {outside}\n")
                path.chmod(0o666)
            case _:
                text = content if isinstance(content, str) else json.dumps(content)
                path.write_text(text)
    for _ in range(rng.randrange(3)):
        path = (
            run_dir / "logs" / rng.choice(NAMES) / rng.choice(["reason", "node-0/run/attempt_x/0"])
        )
        if (run_dir / "logs").is_dir() and not (run_dir / "logs").is_symlink():
            path.mkdir(parents=True, exist_ok=True)


def shown(run: toolkit.Run) -> None:
    """Query a run in all ways; the output holds nothing of other files."""
    seen: list[str] = []
    asked: tuple[Callable[[], str], ...] = (
        lambda: "\n".join(summary_lines(summary_of(run))),
        lambda: json.dumps(rows_of([run]), ensure_ascii=False),
        lambda: "\n".join(run.logs()),
        lambda: "\n".join(failure.lines()) if (failure := run.failure()) else "",
        lambda: str(run.metrics()),
        lambda: "\n".join(goodput_lines(run.name, run.goodput())),
        lambda: "\n".join(origin_lines(origin_of(run))),
        run._repr_html_,
        lambda: run.report().html,
    )
    for ask in asked:
        with guarded():
            seen.append(ask())
    text = "\n".join(seen)
    text.encode()
    assert CANARY not in text


def record(run_dir: Path, profile: Profile, uri: str) -> registry.RunRecord:
    said = profile.model_dump(mode="json", by_alias=True)
    return registry.RunRecord(
        uri=uri, name=run_dir.name, job="probe", profile=said, created=1.7e9, run_dir=run_dir
    )


class Slurm:
    """Answers odd things; what a login node may say."""

    def __init__(self, rng: random.Random, home: str) -> None:
        self.rng, self.home = rng, home

    def __call__(self, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        text = {
            "squeue": squeue(job_row(77, "RUNNING", command=f"{self.home}/probe.sbatch x")),
            "sacct": f"{ACCOUNTED}c|==|77|==|FAILED|==|1:0|==|sbatch {self.home}/x.sbatch|==|\n",
            "scontrol": f"{CONFIG.format('c')}SLURM_VERSION = 24.11.5\nKillWait = 30 sec\n",
        }.get(argv[0], "")
        if self.rng.random() < 0.7:
            text = torn(self.rng, text.encode()).decode(errors="replace")
        status = self.rng.choice([0, 0, 0, 1, 127, -9])
        said = self.rng.choice(["", "Invalid job id", "\x1b[2J slurm_load_jobs error", "x" * 9999])
        return subprocess.CompletedProcess(argv, status, text, said)


@pytest.mark.slow
def test_run_directories_and_login_nodes(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(f"{CANARY}\n[rank 0] {CANARY}\n" + json.dumps({"step": 1, "x": CANARY}))

    def attack(rng: random.Random) -> None:
        run_dir = tmp_path / "probe-1"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir()
        leave(rng, run_dir, outside)
        with guarded():
            match rng.randrange(3):
                case 0:
                    known = record(run_dir, PROFILES[0], "local://probe-1")
                    run = toolkit.api.launcher_for(PROFILES[0]).open(known)
                case 1:
                    uri = f"slurm://c/{rng.choice(['77', '77', '', 'x y', '9' * 40])}"
                    known = record(run_dir, PROFILES[1], uri)
                    slurm = Slurm(rng, str(run_dir))
                    run = SlurmLauncher(SlurmProfile(name="s"), command=slurm).open(known)
                case _:
                    run = toolkit.open_run(str(run_dir))
            shown(run)

    fuzz(attack, again=[279788029176])


@pytest.mark.slow
def test_states(tmp_path: Path, own_user: Path) -> None:
    state = own_user / "state/torch-deploy-toolkit"
    good = [
        record(tmp_path / f"run-{n}", profile, f"{place}://c/run-{n}").as_json()
        for n, (profile, place) in enumerate(zip(PROFILES, ("local", "local", "k8s"), strict=True))
    ][:1]

    def attack(rng: random.Random) -> None:
        shutil.rmtree(state, ignore_errors=True)
        (state / "submitting").mkdir(parents=True)
        lines = [json.dumps(mutated(rng, rng.choice(good))).encode() for _ in range(4)]
        lines[1] = torn(rng, lines[1])
        sound = json.dumps(good[0] | {"name": "sound", "uri": "local://sound"}).encode()
        (state / "runs.jsonl").write_bytes(b"\n".join([*lines, b"\n", sound, b""]))
        begun = {"version": 1, "record": mutated(rng, good[0]), "order": mutated(rng, {"a": [1]})}
        (state / "submitting/run-9.json").write_bytes(
            as_text(rng, mutated(rng, begun)).encode("utf-8", "surrogatepass")
        )
        (state / "cancelled").write_bytes(torn(rng, b"local://c/run-0\n"))
        with guarded():
            runs = list(toolkit.list_runs())
            names = [row["name"] for row in rows_of(runs)]
            assert "sound" in names
            json.dumps(rows_of(runs), ensure_ascii=False).encode()
            toolkit.open_run("sound").status()

    fuzz(attack)


def test_names_on_the_command_line(tmp_path: Path) -> None:
    run_dir = run_directory.make(tmp_path, "probe-1")
    (run_dir / "launch.json").write_text(
        json.dumps(record(run_dir, PROFILES[0], "local://probe-1").as_json())
    )
    words = ["probe-1", str(run_dir), "local://probe-1", "probe-1_7", "k8s://a/b", "slurm://c/1"]

    def attack(rng: random.Random) -> None:
        name = torn(rng, rng.choice(words).encode()).decode(errors="surrogateescape")
        with guarded():
            shown(toolkit.open_run(name))

    fuzz(attack, again=[869421283027])


def test_settings_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOBS[0]))
    words = ["args.0=x", "resources.nnodes=4", "env.A=b", "sweep.grid.--lr=[1,2]", "name=x"]

    def attack(rng: random.Random) -> None:
        given = torn(rng, rng.choice(words).encode()).decode(errors="surrogateescape")
        with guarded():
            checks.check(path, [given], to=[rng.choice(PROFILES)])

    fuzz(attack)
