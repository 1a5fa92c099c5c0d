"""Retention keeps the newest whole checkpoints of any attempt, and removes no other run's."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.rundir.test_claim import save
from train.checkpoints import retention, store
from train.checkpoints.recovery import look
from train.checkpoints.store import Position
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Start

FILE = "rank-00000.safetensors"
ATTEMPTS, STEPS = range(3), range(1, 6)
# Damage to a checkpoint: mostly none. `flipped` does not change sizes, and an additional file
# (`more`) is not part of the checkpoint.
FATES = ("whole", "whole", "whole", "flipped", "short", "lost", "no manifest", "more")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run directory, and the store that prunes it."""

    fates: dict[Position, str]
    drafts: frozenset[Position]
    newest: Position
    keep: int

    def make(self, run_dir: Path, model: Path) -> None:
        for position, fate in self.fates.items():
            path = position.path(run_dir)
            copy(model, path, step=position.step)
            match fate:
                case "short":
                    os.truncate(path / FILE, 3)
                case "lost":
                    (path / FILE).unlink()
                case "no manifest":
                    (path / "manifest.json").unlink()
                case "more":
                    (path / "rank-00001.safetensors").touch()
                case "flipped":
                    flip(path / FILE)
        for position in self.drafts:
            # One that is being written, and one half removed.
            shutil.copytree(model, position.draft(run_dir))
            position.path(run_dir).with_suffix(".old.tmp").mkdir()

    def prune(self, run_dir: Path) -> None:
        damaged = {position for position, fate in self.fates.items() if fate == "flipped"}
        retention.prune(run_dir, self.newest, keep=self.keep, damaged=damaged)

    def expected(self) -> set[Position]:
        """All that is as good as the last of those to be kept, or not ours to remove."""
        ours = {
            position
            for position in self.fates
            if position.attempt <= self.newest.attempt and position.step <= self.newest.step
        }
        whole = sorted(p for p in ours if self.fates[p] in ("whole", "more"))
        if len(whole) < self.keep:
            return set(self.fates)
        return {p for p in self.fates if p not in ours or p >= whole[-self.keep]}


def copy(model: Path, path: Path, *, step: int) -> None:
    """Copy a checkpoint as one of another step."""
    shutil.copytree(model, path)
    state = replace(store.read_state(model), step=step)
    store.write_manifest(path, state, {FILE: store.measure(path / FILE)})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


positions = st.builds(Position, attempt=st.sampled_from(ATTEMPTS), step=st.sampled_from(STEPS))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    newest = draw(positions)
    fates = draw(st.dictionaries(positions, st.sampled_from(FATES), min_size=3, max_size=10))
    return Case(
        fates={**fates, newest: "whole"},
        drafts=draw(st.frozensets(positions, max_size=3)),
        newest=newest,
        keep=draw(st.integers(1, 3)),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), attempt=0)


def entries(run_dir: Path) -> dict[str, bytes | None]:
    found = {str(p.relative_to(run_dir)): p for p in run_dir.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


@pytest.mark.slow
@given(case=cases())
def test_the_newest_whole_ones_stay_and_what_lies_behind_them_goes(model: Path, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        case.make(run_dir, model)
        attempts = [a for a in ATTEMPTS if a >= case.newest.attempt]
        before = entries(run_dir), [look(run_dir, attempt=a).best for a in attempts]
        case.prune(run_dir)
        after = entries(run_dir), [look(run_dir, attempt=a).best for a in attempts]
        assert set(store.list_committed(run_dir)) == case.expected()
        # No later start continues from an older one.
        assert before[1] == after[1]
        # What stays is as it was, and a later attempt's drafts stay as well.
        assert after[0].items() <= before[0].items()
        drafts = {path.relative_to(run_dir) for path in run_dir.glob("checkpoints/*/*.tmp")}
        later = {p for p in case.drafts if p.attempt > case.newest.attempt}
        assert len(drafts) == 2 * len(later)
        # There is nothing left to do.
        case.prune(run_dir)
        assert entries(run_dir) == after[0]


@pytest.mark.slow
@given(case=cases(), data=st.data())
def test_a_fenced_attempt_takes_nothing_from_the_one_that_has_replaced_it(
    model: Path, case: Case, data: st.DataObject
) -> None:
    """Though it may prune at any moment: it has looked at the fence an instant before."""
    older = data.draw(st.sampled_from([p for p in case.fates if p <= case.newest]))
    with tempfile.TemporaryDirectory() as home:
        run_dir = Path(home)
        case.make(run_dir, model)
        later = [run_dir / f"checkpoints/attempt-{a}" for a in ATTEMPTS if a > older.attempt]
        before = [entries(folder) for folder in later]
        retention.prune(run_dir, older, keep=1)
        assert [entries(folder) for folder in later] == before


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path, model: Path) -> None:
    newest = Position(attempt=1, step=5)
    for position in (newest, *(Position(attempt=0, step=step) for step in STEPS)):
        copy(model, position.path(tmp_path), step=position.step)
    stuck = Position(attempt=0, step=3).path(tmp_path)
    stuck.with_suffix(".old.tmp").write_text("in the way")
    retention.prune(tmp_path, newest, keep=1)
    assert [p.path(tmp_path) for p in store.list_committed(tmp_path)] == [
        newest.path(tmp_path),
        stuck,
    ]


@pytest.mark.slow
def test_a_later_attempt_counts_earlier_ones_checkpoints_but_no_damaged_ones(
    start: Start, tmp_path: Path
) -> None:
    flags = ("--task=chars", "--global-batch=12", "--checkpoint-every=10")
    run_dir = tmp_path / "run"

    def names() -> list[str]:
        paths = run_dir.glob("checkpoints/attempt-*/step-*")
        return sorted(str(path.relative_to(run_dir / "checkpoints")) for path in paths)

    start.single(*flags, "--steps=30", run_dir=run_dir).finish()
    first = [f"attempt-0/step-{step:08d}" for step in (20, 30)]
    assert names() == first
    flip(run_dir / "checkpoints" / first[1] / FILE)
    shutil.copytree(
        run_dir / "checkpoints" / first[0], run_dir / "checkpoints/attempt-0/step-5.tmp"
    )
    second = start.single(*flags, "--steps=31", "--keep-checkpoints=3", run_dir=run_dir, attempt=1)
    second.finish()
    assert [e["step"] for e in second.events() if e["event"] == "resume"] == [20]
    # Three that are whole, and the damaged one among them.
    assert names() == [*first, *(f"attempt-1/step-{step:08d}" for step in (30, 31))]
    start.single(*flags, "--steps=32", run_dir=run_dir, attempt=2).finish()
    assert names() == ["attempt-1/step-00000031", "attempt-2/step-00000032"]


def test_who_is_fenced_while_it_commits_removes_nothing(start: Start, tmp_path: Path) -> None:
    """The newer attempt may be about to read just what would be removed."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from train import __main__\n"
        "from train.checkpoints import store\n"
        "commit = store.commit\n"
        "def commit_and_wait(draft, path):\n"
        "    commit(draft, path)\n"
        "    while path.name == 'step-00000040' and not Path('go').exists():\n"
        "        time.sleep(0.01)\n"
        "store.commit = commit_and_wait\n"
        "__main__.enter()\n"
    )
    flags = ("--task=chars", "--global-batch=12", "--steps=100000")
    saving = ("--checkpoint-every=20", "--keep-checkpoints=1")
    old = start.single(*flags, *saving, run_dir=tmp_path / "run", script="slow.py")
    both = [Position(attempt=0, step=step) for step in (40, 20)]
    old.wait_until(lambda: store.list_committed(old.run_dir) == both)
    newer = RankInfo(attempt=1)
    outcome = TrainingProgress(steps=9).outcome(newer, "running", "starting")
    assert RunDirectory(old.run_dir, newer).write_outcome(outcome)
    (tmp_path / "go").touch()
    old.finish(1)
    assert "a newer attempt has taken over" in old.output()
    assert store.list_committed(old.run_dir) == both
