"""Checkpoints and records of other users' run directories are data, and never cause a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from train.checkpoints import safetensors_file, store
from train.checkpoints.reader import Stored
from train.checkpoints.recovery import look
from train.checkpoints.safetensors_file import TensorPart
from train.checkpoints.store import Position, State
from train.errors import CheckpointError, RefusedError, UsageError
from train.rundir import untrusted
from train.rundir.claim import claim
from train.rundir.console import Console
from train.rundir.files import RunDirectory, read_lines
from train.rundir.jsonl import Journal
from train.rundir.lock import Contender
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

ROOT = Path(__file__).parents[2]
FILE = "rank-00000.safetensors"
IDENTITY = {"task": "digits", "lr": 0.1, "seed": 0}
STATE = State(step=6, epoch=0, samples_seen=384, world_size=1, identity=IDENTITY, config={})
DEEP = "[" * 100_000
HUGE = 10**30


def save(run_dir: Path, *, step: int, state: State | None = None) -> Path:
    path = Position(attempt=0, step=step).path(run_dir)
    store.begin(path)
    part = TensorPart(name="model.weight", dtype=torch.float32, offsets=(0,), sizes=(2,))
    proof = safetensors_file.write(path / FILE, [part], [torch.ones(2)])
    store.write_manifest(path, state or replace(STATE, step=step), {FILE: proof})
    return path


def manifest(path: Path, **changed: Any) -> None:
    """Write a manifest that fits the files of the checkpoint, except for the given changes."""
    read = json.loads((path / "manifest.json").read_text())
    read["files"]["state.json"] = store.measure(path / "state.json")
    (path / "manifest.json").write_text(json.dumps({**read, **changed}))


def listed(path: Path, name: str) -> None:
    files = json.loads((path / "manifest.json").read_text())["files"]
    manifest(path, files={**files, name: store.measure(path / name)})


def state(path: Path, text: str = "", **changed: Any) -> None:
    """Write a state, and a manifest that fits."""
    read = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(text or json.dumps({**read, **changed}))
    manifest(path)


def special(path: Path, kind: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to("elsewhere")
        case "device":
            path.symlink_to("/dev/zero")
        case "large":
            path.touch()
            os.truncate(path, 20 << 30)  # sparse
        case "folder":
            path.mkdir()


MANIFEST, STATE_FILE = "manifest.json", "state.json"


@pytest.mark.parametrize(
    ("poison", "reason"),
    [
        (lambda p: special(p / MANIFEST, "pipe"), "is a pipe, not a regular file"),
        (lambda p: special(p / MANIFEST, "link"), "is a link, which is not followed"),
        (lambda p: special(p / MANIFEST, "device"), "is a link, which is not followed"),
        (lambda p: special(p / MANIFEST, "large"), "has more than 16777216 bytes"),
        (lambda p: special(p / MANIFEST, "folder"), "is a folder, not a regular file"),
        (lambda p: special(p / STATE_FILE, "pipe"), "is a pipe, not a regular file"),
        (lambda p: special(p / STATE_FILE, "link"), "is a link, which is not followed"),
        (lambda p: special(p / FILE, "pipe"), "is a pipe, not a regular file"),
        (lambda p: special(p / FILE, "device"), "is a link, which is not followed"),
        (lambda p: special(p / FILE, "large"), "21474836480 bytes, not"),
        (lambda p: (p / MANIFEST).write_text(DEEP), "not a manifest (nested too deeply)"),
        (lambda p: (p / MANIFEST).write_text('{"files": {}}'), "not a manifest (no 'version')"),
        (lambda p: manifest(p, files={}), "lists no state.json"),
        (lambda p: manifest(p, files={"state.json": {}}), "lists no file of tensors"),
        (lambda p: manifest(p, files=[1]), "expected a JSON object, not a list"),
        (lambda p: manifest(p, files={FILE: 5, "state.json": {}}), "expected a JSON object, not 5"),
        (lambda p: manifest(p, version="9" * 5000), "format version '999"),
        (lambda p: manifest(p, step=-6), "from 0 to 9007199254740992, not -6"),
        (lambda p: manifest(p, step=3), "is of step 3"),
        (lambda p: manifest(p, samples_seen=5), "samples_seen 384, not 5"),
        (
            lambda p: listed(p, "../../../victim"),
            "lists '../../../victim', which is not a checkpoint",
        ),
        (lambda p: listed(p, "/etc/passwd"), "lists '/etc/passwd', which is not a checkpoint"),
        (lambda p: state(p, version=99), "99, not 1; a newer version of train/ wrote it"),
        (lambda p: state(p, "[]"), "expected a JSON object, not a list"),
        (lambda p: state(p, DEEP), "not a state (nested too deeply)"),
        (lambda p: state(p, step=HUGE), "to 9007199254740992, not a larger one"),
        (lambda p: state(p, step=-5), "to 9007199254740992, not -5"),
        (lambda p: state(p, step=3), "step 3, not 6"),
        (lambda p: state(p, samples_seen="x"), "to 9007199254740992, not 'x'"),
        (lambda p: state(p, samples_seen=640), "samples_seen 640, not 384"),
        (lambda p: state(p, world_size=True), "to 9007199254740992, not True"),
        (lambda p: state(p, identity="x"), "expected a JSON object, not 'x'"),
        (lambda p: state(p, config=None), "expected a JSON object, not null"),
        (lambda p: state(p, frozen={"a": 1}), "'frozen' is not a list"),
        (lambda p: state(p, frozen=[5]), "expected a string, not 5"),
        (lambda p: state(p, loss="low"), "expected a number, not 'low'"),
        (lambda p: state(p, scaler={"x": 1}), "no 'scale'"),
        (lambda p: state(p, scaler={"scale": 0, "good_steps": 0}), "cannot be scaled by 0"),
    ],
)
def test_a_poisoned_checkpoint_is_reported_and_the_one_before_is_taken(
    tmp_path: Path, poison: Callable[[Path], object], reason: str
) -> None:
    (tmp_path / "victim").write_text("not to be read")
    save(tmp_path, step=3)
    newest = save(tmp_path, step=6)
    poison(newest)
    seen = look(tmp_path, attempt=0)
    assert seen.best == Position(attempt=0, step=3)
    ((position, why),) = seen.damaged
    assert position == Position(attempt=0, step=6)
    assert why.startswith(f"{newest}/")
    assert reason in why


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, step=3)
    save(tmp_path, step=6).rename(Position(attempt=0, step=8).path(tmp_path))
    seen = look(tmp_path, attempt=0)
    assert seen.best == Position(attempt=0, step=3)
    assert [why.rpartition(": ")[2] for _, why in seen.damaged] == ["is of step 6"]
    far = Position(attempt=0, step=HUGE).path(tmp_path)
    save(tmp_path, step=6).rename(far)
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=3)
    state(far, step=HUGE)
    manifest(far, step=HUGE)
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=3)


def header(path: Path, **metadata: str) -> None:
    """Write a file of tensors with a header of the attacker's, and a manifest that fits."""
    head = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", **metadata},
        "model.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    (path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    store.write_manifest(path, replace(STATE, step=6), {FILE: store.measure(path / FILE)})


def offsets(value: object) -> dict[str, str]:
    return {"DCP_SHARDING_INFO": json.dumps({"model.weight": {"saved_offsets": value}})}


@pytest.mark.parametrize(
    "metadata",
    [
        offsets([-1]),
        offsets([1]),
        offsets([2**40]),
        offsets([2**70]),
        offsets([]),
        offsets([0, 0]),
        offsets("x"),
        offsets(None),
        offsets([1.5]),
        {"DCP_SHARDING_INFO": DEEP},
        {"DCP_SHARDING_INFO": "5"},
        {"torch_dtypes": DEEP},
        {"torch_dtypes": "[]"},
        {"torch_dtypes": '{"model.weight": "load"}'},
        {"torch_dtypes": '{"model.weight": 5}'},
    ],
    ids=lambda metadata: str(metadata)[:60],
)
def test_headers_that_make_up_no_tensors_are_told(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = save(tmp_path, step=6)
    Stored(path)
    header(path)
    assert [*Stored(path).listing] == ["model.weight"]
    header(path, **metadata)
    with pytest.raises(CheckpointError, match=rf"^cannot read checkpoint {path}: "):
        Stored(path)


def claimed(run_dir: Path) -> str | None:
    group = RankGroup(rank_info=RankInfo(), device=torch.device("cpu"))
    return claim(RunDirectory(run_dir, RankInfo()), IDENTITY, 9, group)


@pytest.mark.parametrize(
    "content", ["{", "[]", DEEP, '{"identity": "x"}', '{"identity": [1]}', "\udcff", "5"]
)
def test_a_record_of_the_run_that_says_nothing_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(RefusedError, match=rf"^{file} is damaged \(.*remove that file if"):
        claimed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", ["run.json", "holder.json", "events.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "link", "large"])
def test_a_special_file_in_a_records_place_is_named_and_left_alone(
    tmp_path: Path, name: str, kind: str
) -> None:
    file = tmp_path / name
    file.write_text("{}")
    special(file, kind)
    if name == "events.jsonl":
        if kind == "large":
            return  # as long as it is one, lines may be added to it
        with pytest.raises(untrusted.Refused):
            Journal(file).append("{}")
        assert read_lines(file) == []
    elif (name, kind) == ("holder.json", "large"):
        assert claimed(tmp_path) is None  # no claim, as by its first bytes
    else:
        with pytest.raises(UsageError, match=rf"^cannot use run directory .*: {name} (is a|has)"):
            claimed(tmp_path)
    if kind == "link":
        assert (tmp_path / "elsewhere").read_text() == "{}"


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        DEEP,
        "null",
        '{"host": 5}',
        json.dumps({"host": [], "boot": 1, "pid": "x", "attempt": None, "restart": {}}),
        json.dumps(
            {"host": "a", "boot": "b", "pid": HUGE, "attempt": 0, "restart": 0, "launch": None}
            | {"since": 0}
        ),
    ],
)
def test_a_holder_of_other_types_holds_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "holder.json").write_text(content)
    assert claimed(tmp_path) is None


@pytest.mark.parametrize("since", [1e300, -1e300, 1e13])
def test_a_holder_of_any_time_can_be_named(tmp_path: Path, since: float) -> None:
    record = {"host": "\x1b]0;x\x07", "boot": "b", "pid": 1, "attempt": 0, "restart": 0}
    record |= {"launch": None, "since": since}
    (tmp_path / "holder.json").write_text(json.dumps(record))
    contender = Contender(tmp_path / "holder.json", RankInfo(), Console(rank=1))
    assert contender.look(ended=None) == "mine" or contender.holder is not None
    if contender.holder:
        assert "\x1b" not in contender.holder.describe()


GOOD = {
    "status": "done", "attempt": 0, "restart": 0, "step": 9, "steps": 9, "samples_seen": 9,
    "rank": None, "reason": "", "metrics": {"loss": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": "x"}, {"attempt": None}, {"attempt": -1}, {"attempt": HUGE}, {"restart": []},
        {"step": "9"}, {"step": 9.5}, {"steps": "x"}, {"samples_seen": {}}, {"rank": "a"},
        {"status": 5}, {"reason": None}, {"metrics": []}, {"metrics": {"loss": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_an_outcome_of_other_types_is_none(tmp_path: Path, changed: dict[str, object]) -> None:
    directory = RunDirectory(tmp_path, RankInfo())
    (tmp_path / "outcome.json").write_text(json.dumps(GOOD))
    assert directory.read_outcome() is not None
    (tmp_path / "outcome.json").write_text(json.dumps(GOOD | changed))
    assert directory.read_outcome() is None
    assert claimed(tmp_path) is None


def test_what_is_not_finite_in_an_outcome_is_shown(tmp_path: Path) -> None:
    done = GOOD | {"metrics": {"loss": None, "\x1b[2J": 1}}
    (tmp_path / "outcome.json").write_text(json.dumps(done))
    text = claimed(tmp_path)
    assert text is not None
    assert text.startswith("already done: step 9/9, loss nan, '\\x1b[2J' 1.0000 ·")


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_an_outcome_that_is_no_file_is_none(tmp_path: Path, kind: str) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps(GOOD))
    special(tmp_path / "outcome.json", kind)
    assert RunDirectory(tmp_path, RankInfo()).read_outcome() is None


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "train", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Without a limit of its own, a hang would be the whole test run's.
    return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_start_goes_on_from_the_checkpoint_before_a_pipe(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--run-dir", str(run_dir), "--checkpoint-every=1")
    assert start(*flags, "--steps=2").returncode == 0
    newest = run_dir / "checkpoints/attempt-0/step-00000002"
    special(newest / "manifest.json", "pipe")
    state(run_dir / "checkpoints/attempt-0/step-00000001", extra="of a later version")
    ended = start(*flags, "--steps=3")
    assert ended.returncode == 0, ended.stderr
    skipped = (
        f"skipping a damaged checkpoint: {newest}/manifest.json: is a pipe, not a regular file\n"
    )
    assert skipped in ended.stdout
    assert "resuming after step 1/3" in ended.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lr = " + b"[" * 100_000, "nested too deeply; a configuration is one flat table"),
        (b"steps = " + b"9" * 5000, "not TOML: "),
        (b"#" * (1 << 21), "more than 1048576 bytes, is that a configuration?"),
    ],
)
def test_a_configuration_beyond_reason_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    ended = start("--config", str(file))
    assert ended.returncode == 2
    assert f"--config {file}: {message}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_lines_of_a_file_are_read_within_limits(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(f'{{"a": 1}}\n{DEEP}\n[1]\n{{"b": \n{{"c": 2}}\n')
    assert read_lines(file) == [{"a": 1}, {"c": 2}]
