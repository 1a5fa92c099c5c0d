"""Removing old checkpoints, but only once newer ones are whole."""

import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from ..rundir.console import Console
from ..rundir.files import RunDirectory
from . import store
from .store import Position


class Retention:
    """Decides which checkpoints of a run to keep in rank 0's directory."""

    def __init__(self, directory: RunDirectory, console: Console, *, keep: int) -> None:
        self._directory, self._console, self._keep = directory, console, keep
        self.damaged: set[Position] = set()
        """Checkpoints that were damaged at the start and have not been written again."""

    def prune(self, newest: Position, *, keep: int | None = None) -> list[Position]:
        """Remove all checkpoints except those to keep."""
        # A later start that has taken over may be reading one of them.
        if self._directory.superseded():
            return []
        keep = self._keep if keep is None else keep
        return prune(self._directory.path, newest, keep=keep, damaged=self.damaged)

    def make_room(self, position: Position) -> str:
        """Remove checkpoints that a new one will replace; at least one whole checkpoint stays.

        Returns a sentence with their names; '' if there were none.
        """
        removed = self.prune(position, keep=max(self._keep - 1, 1))
        if not removed:
            return ""
        names = _listed(removed)
        self._console.say(f"no room for the checkpoint of step {position.step}: removed {names}")
        paths = [str(position.path(Path())) for position in removed]
        with suppress(OSError):
            self._directory.event("room_made", step=position.step, removed=paths)
        return f"{names} had to go for it, newer ones are untouched"

    def may_go(self, position: Position) -> str:
        """Name the checkpoints that a user may remove and still resume this run."""
        run_dir, texts = self._directory.path, []
        spare = behind(run_dir, position, keep=1, damaged=self.damaged)
        useless = sorted(self.damaged.difference(spare))
        whole = [p for p in store.list_committed(run_dir) if p not in (*spare, *useless, position)]
        if spare:
            texts.append(f"{_listed(spare)} may go, as with --keep-checkpoints 1")
        if useless:
            texts.append(f"{_listed(useless)} may go, as damaged")
        if whole and not spare:
            texts.append(f"{_listed(whole)} must stay")
        return "; ".join([*texts, "make room there and start again"])


def prune(
    run_dir: Path, newest: Position, *, keep: int, damaged: Collection[Position] = ()
) -> list[Position]:
    """Remove all but the last `keep` whole checkpoints; return those removed.

    Call it once `newest` is committed, or before that to make room. It considers the attempt of
    `newest` and earlier ones: these are fenced, so their drafts never become checkpoints.
    Checkpoints of a later attempt are kept.

    A checkpoint counts as whole by the sizes of its files, unless it is known to be `damaged`.
    """
    for _, path in list(store.entries(run_dir, newest.attempt)):
        if path.suffix == ".tmp":
            store.discard(path)
    removed = []
    for position in behind(run_dir, newest, keep=keep, damaged=damaged):
        path = position.path(run_dir)
        # Rename first: a partly removed directory must not look like a checkpoint.
        doomed = path.with_suffix(".old.tmp")
        with suppress(OSError):
            path.rename(doomed)
            removed.append(position)
            shutil.rmtree(doomed)
    return removed


def behind(
    run_dir: Path, newest: Position, *, keep: int, damaged: Collection[Position] = ()
) -> list[Position]:
    """List the checkpoints before the last `keep` whole ones up to `newest`, best first.

    A checkpoint after `newest` is damaged, and the run is repeating its steps: it does not count,
    and is kept until the run reaches that step.
    """
    whole, older = 0, []
    for position in store.list_committed(run_dir, up_to_attempt=newest.attempt):
        if position.step > newest.step:
            continue
        if whole >= keep:
            older.append(position)
        elif position not in damaged:
            with suppress(CheckpointError):
                # The contents of the files are not read.
                store.verify(position.path(run_dir), by_size=True)
                whole += 1
    return older


def _listed(positions: Iterable[Position]) -> str:
    return ", ".join(str(p.path(Path()).relative_to("checkpoints")) for p in positions)
