"""The trainer's report on checkpoints: seconds that training stood, steps since the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.support.making import trainer_for
from train.checkpoints import checkpointer, saver, store
from train.checkpoints.planner import Staging
from train.model import gradients
from train.rundir.console import Console
from train.rundir.files import RunDirectory, read_lines

FROZEN = '''
from train.tasks.digits import Digits

class Some(Digits):
    """Digits, of which some layers are not trained."""
    frozen = ()

    def model(self):
        model = super().model()
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        return model

class First(Some):
    frozen = ("0.weight", "0.bias")

class Last(Some):
    frozen = ("0.bias",)
'''


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(run_dir / "events.jsonl") if e["event"] == kind]


def test_stall_seconds_is_all_the_time_that_training_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of our own, on which each part takes a time that no sum of others makes."""
    now = [0.0]
    waits = threading.Event()

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return call(*given, **named)

        return timed

    def join(self: checkpointer.Checkpointer) -> None:
        if self._thread is not None:
            waits.set()
        real_join(self)

    def commit(draft: Path, path: Path) -> None:
        # Not before training waits for it, so that it is known for how long.
        waits.wait()
        waits.clear()
        now[0] += 1000
        real_commit(draft, path)

    real_join, real_commit = checkpointer.Checkpointer._join, store.commit
    clock = SimpleNamespace(monotonic=lambda: now[0])
    trainer = trainer_for(0, 1, tmp_path)
    trainer.resume()
    monkeypatch.setattr(saver, "time", clock)
    monkeypatch.setattr(checkpointer, "time", clock)
    monkeypatch.setattr(checkpointer.Checkpointer, "_join", join)
    monkeypatch.setattr(store, "commit", commit)
    monkeypatch.setattr(saver, "not_finite", taking(10, gradients.not_finite))
    monkeypatch.setattr(Staging, "copy", taking(100, Staging.copy))

    def save() -> None:
        trainer.train_step()
        with monkeypatch.context() as patch:
            # Of the flush that a save begins with, not of those before an event.
            flush = taking(1, RunDirectory.flush)

            def once(directory: RunDirectory) -> None:
                patch.undo()
                flush(directory)

            patch.setattr(RunDirectory, "flush", once)
            trainer.saver.save(trainer.progress, epoch=0)

    save()
    # Training goes on meanwhile: that is no standing.
    now[0] += 5e6
    save()
    now[0] += 5e6
    trainer.saver.wait()
    save()
    trainer.saver.wait()
    # The first is waited for by the second, the others in a wait of their own.
    assert [e["stall_seconds"] for e in events(tmp_path, "checkpoint")] == [111, 2111, 1111]
    assert [e["seconds"] for e in events(tmp_path, "checkpoint")] == [
        5e6 + 111 + 1000 + 1,
        5e6 + 2111,
        1111,
    ]


def test_parameters_that_were_frozen_or_thawed_since_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "frozen.py"
    task.write_text(FROZEN)
    run_dir = tmp_path / "run"

    def resumed(name: str) -> list[str]:
        trainer = trainer_for(0, 1, run_dir, task=f"{task}:{name}")
        trainer.saver.console = Console(rank=0)
        trainer.resume()
        trainer.train_step()
        trainer.saver.save(trainer.progress, epoch=0)
        trainer.saver.wait()
        found = events(run_dir, "resume")
        changed: list[str] = found[-1]["changed"] if found else []
        return changed

    assert resumed("First") == []
    assert resumed("First") == []
    assert "with another configuration" not in capsys.readouterr().out
    changed = resumed("Last")
    assert changed == ["frozen there, trained here: 0.weight"]
    assert f"with another configuration: {changed[0]}\n" in capsys.readouterr().out
    assert resumed("First") == ["trained there, frozen here: 0.weight"]
    assert resumed("Some") == ["frozen there, trained here: 0.bias, 0.weight"]


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    strategy = trainer_for(0, 1, tmp_path).strategy
    weights = strategy.model_state()
    names = sorted(weights)[:2]
    for name in names:
        del weights[name]
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        strategy.load_model_state(weights)
    assert all(f'"{name}"' in str(caught.value) for name in names)
