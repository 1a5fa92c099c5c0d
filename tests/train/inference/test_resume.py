"""Predictions go on where they were stopped, and never mix what two commands have made."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.train.support.whole_runs import Ended, run

# A model that draws random numbers; and a prediction in which a rank gets a signal.
STOPPED = """
import os
import threading
from pathlib import Path
import torch
from torch import nn
from train.tasks.digits import Digits

class Noisy(nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs) + torch.rand(len(inputs), 10, device=inputs.device)

class Stopped(Digits):
    calls = 0

    def model(self):
        return Noisy(*super().model())

    def predictions(self, outputs, targets):
        self.calls += 1
        order = Path(__file__).with_name("order")
        if order.exists():
            rank, number = order.read_text().split()
            if self.calls == 4 and os.environ.get("RANK", "0") == rank:
                os.kill(os.getpid(), int(number))
                threading.Event().wait()
        return super().predictions(outputs, targets)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task in a file, trained for two steps, and its predictions."""
    home = tmp_path_factory.mktemp("stopped")
    (home / "task.py").write_text(STOPPED)
    for flags in (["--steps=2", "--checkpoint-every=1"], [f"--predict={home / 'unbroken'}"]):
        assert use(1, home, *flags).status == 0
    return home


def use(ranks: int, home: Path, *flags: str) -> Ended:
    named = (f"--task={home / 'task.py'}:Stopped", f"--run-dir={home / 'run'}")
    return run(ranks, *named, "--eval-batch=16", *flags, environ={})


@pytest.mark.parametrize(
    ("first", "then", "flags"),
    [(1, 2, ()), (2, 4, ("--strategy=hsdp",))],
)
def test_a_killed_prediction_goes_on_with_other_ranks_and_ends_in_the_same_bytes(
    home: Path, tmp_path: Path, first: int, then: int, flags: tuple[str, ...]
) -> None:
    file, order = tmp_path / "file", home / "order"
    order.write_text(f"{first - 1} {signal.SIGKILL.value}")
    try:
        killed = use(first, home, f"--predict={file}")
    finally:
        order.unlink()
    assert killed.statuses[-1] == -signal.SIGKILL
    parts = sorted(path.name for path in (tmp_path / "file.parts").glob("part-*"))
    assert len(parts) >= 3
    assert not file.exists()
    # A file that a kill has left behind, and a part that a disk has lost.
    (tmp_path / "file.parts/.part-000009.jsonl.host.1.2.tmp").write_text("{")
    (tmp_path / "file.parts" / parts[0]).write_text("")
    ended = use(then, home, f"--predict={file}", *flags)
    assert ended.status == 0, ended.output
    assert f"continuing: {len(parts) - 1} of 23 parts exist" in ended.output
    assert file.read_bytes() == (home / "unbroken").read_bytes()
    assert not (tmp_path / "file.parts").exists()


def test_a_stop_request_ends_a_prediction_at_once_with_75(home: Path, tmp_path: Path) -> None:
    order = home / "order"
    order.write_text(f"0 {signal.SIGTERM.value}")
    try:
        stopped = use(1, home, f"--predict={tmp_path / 'file'}")
    finally:
        order.unlink()
    assert stopped.status == 75
    assert stopped.output.splitlines()[-1] == (
        "train: stopped by SIGTERM; start again to continue with the existing parts"
    )
    assert use(1, home, f"--predict={tmp_path / 'file'}").status == 0
    assert (tmp_path / "file").read_bytes() == (home / "unbroken").read_bytes()


def test_the_result_of_the_same_command_stays_and_is_good(home: Path) -> None:
    file = home / "unbroken"
    before = file.stat()
    again = use(1, home, f"--predict={file}")
    assert again.status == 0
    assert again.output.splitlines()[-1] == f"{file} is the result of this command already"
    assert file.stat().st_ino == before.st_ino
    # In another layout that computes the same, too, by which a file that was changed is refused.
    good = file.read_bytes()
    file.write_bytes(good.replace(b"1", b"2"))
    changed = use(2, home, f"--predict={file}", "--strategy=fsdp")
    file.write_bytes(good)
    assert changed.status == 2
    assert "the file exists, and has been changed since it was written; " in changed.output


def test_the_file_of_another_command_is_not_overwritten(home: Path, tmp_path: Path) -> None:
    file = home / "unbroken"
    other = use(1, home, f"--predict={file}", "--checkpoint=1", "--eval-batch=8")
    assert other.status == 2
    assert "  batch: 16 there, 8 here\n" in other.output
    assert "  step: 2 there, 1 here\n" in other.output
    assert other.output.startswith(
        f"train: --predict {file}: the file exists, and is the result of another command; name "
        "another file, or remove this one\n"
    )
    mine = tmp_path / "mine"
    mine.write_text("mine")
    refused = use(1, home, f"--predict={mine}")
    assert refused.status == 2
    assert "and no mine.command.json beside it shows that this command has written it" in (
        refused.output
    )
    assert mine.read_text() == "mine"


def test_parts_of_another_command_are_refused_and_stay(home: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "file.parts"
    folder.mkdir()
    command = json.loads((home / "unbroken.command.json").read_text())
    del command["output"]
    (folder / "command.json").write_text(json.dumps({**command, "step": 1}))
    (folder / "part-000000.jsonl").write_text("{}\n")
    refused = use(1, home, f"--predict={file}")
    assert refused.status == 2
    assert "  step: 1 there, 2 here" in refused.output
    assert (folder / "part-000000.jsonl").read_text() == "{}\n"
    (folder / "command.json").unlink()
    refused = use(1, home, f"--predict={file}")
    assert refused.status == 2
    assert "has no command.json, so the origin of its parts is unknown" in refused.output
