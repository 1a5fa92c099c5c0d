"""The prediction file, and its assembly from parts.

FILE.parts/{command.json,part-<NNNNNN>.jsonl} exist until all parts are complete; then FILE and
FILE.command.json. A part holds the predictions of successive batches. The division into parts
depends only on the data and the batch size, so any ranks can continue after others were killed.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import OutputError, UsageError
from ..rundir import untrusted
from ..rundir.claim import differences
from ..rundir.files import draft_of, write_atomically
from ..rundir.jsonl import dump

VERSION = 1
MOST_PARTS = 1024
"""Limit on parts: a kill costs each rank at most a thousandth of all work, and the folder stays
small."""
COMMAND = "command.json"
BLOCK_BYTES = 1 << 20
VISIBLE_S = 60.0
"""How long a network file system may take to show a file that another node has written."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How samples are divided into batches, and batches grouped into parts."""

    samples: int
    """How many samples there are."""
    batch: int
    """Samples of a batch; the last one may have fewer."""

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return -(-self.samples // self.batch)

    @property
    def batches_per_part(self) -> int:
        """How many batches a part has; the last one may have fewer."""
        return max(-(-self.batches // MOST_PARTS), 1)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.batches // self.batches_per_part)

    def batches_of(self, part: int) -> range:
        """Number the batches of a part."""
        first = part * self.batches_per_part
        return range(first, min(first + self.batches_per_part, self.batches))

    def samples_of(self, batches: range) -> range:
        """Number the samples of successive batches.

        >>> Partition(samples=10, batch=4).samples_of(range(1, 3))
        range(4, 10)
        """
        return range(batches.start * self.batch, min(batches.stop * self.batch, self.samples))


class PredictionFile:
    """A prediction file while its parts are written."""

    def __init__(self, path: Path, partition: Partition, command: Mapping[str, object]) -> None:
        """Describe the file; `command`: everything that determines its bytes, as JSON types."""
        self.path, self.partition = path, partition
        self.folder = Path(f"{path}.parts")
        self._record_path = Path(f"{path}.{COMMAND}")
        self._command = {"version": VERSION, **command}

    def begin(self) -> list[int] | None:
        """Return the missing parts, or None if the file is already complete.

        Raises:
            UsageError: the file or its parts belong to another command, or the path is not
                writable.
        """
        path, folder = self.path, self.folder
        try:
            if path.is_dir():
                raise UsageError(f"--predict {path}: is a directory; name a file in it")
            if os.path.lexists(path):
                self._check_finished()
                return None
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink():
                raise untrusted.Refused(folder, "is a link, which is not followed")
            folder.mkdir(exist_ok=True)
            self._check_command()
            for draft in folder.glob(".*.tmp"):
                draft.unlink(missing_ok=True)
            return [part for part in range(self.partition.parts) if not self._is_whole(part)]
        except OSError as error:
            where = error.filename or folder
            raise UsageError(f"--predict {path}: {where}: {error.strerror}") from error

    def write(self, part: int, lines: Iterable[str]) -> None:
        """Write a part atomically.

        Raises:
            OutputError: the part cannot be written.
        """
        try:
            write_atomically(self._part(part), "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise self._unwritable(error) from error

    def join(self) -> None:
        """Concatenate all parts in order, and remove them.

        Raises:
            OutputError: a part is missing, or the file cannot be written.
        """
        try:
            # Write the draft in the folder: it is removed along with the folder after a kill.
            draft = draft_of(self.folder / "joined")
            digest, count = hashlib.sha256(), 0
            with draft.open("wb") as file:
                for block in self._blocks():
                    digest.update(block)
                    count += file.write(block)
                file.flush()
                os.fsync(file.fileno())
            proof = {"bytes": count, "sha256": digest.hexdigest()}
            record = {**self._command, "output": proof}
            write_atomically(self._record_path, dump(record, indent=2) + "\n")
            if os.path.lexists(self.path):
                raise OutputError(f"{self.path} has been made by another process meanwhile")
            draft.replace(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        # The file is complete now, even if removing the parts fails.
        with suppress(OSError):
            shutil.rmtree(self.folder)

    def _part(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.jsonl"

    def _check_finished(self) -> None:
        """Refuse a file that is not the result of this command."""
        try:
            record = untrusted.read_object(self._record_path)
            proof = untrusted.mapping(record.pop("output", None))
        except (OSError, ValueError):
            why = f"no {self._record_path.name} beside it shows that this command has written it"
            raise self._refused(f"the file exists, and {why}") from None
        if lines := differences(record, self._command):
            text = "the file exists, and is the result of another command"
            raise self._refused(text, lines)
        with os.fdopen(untrusted.open_file(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            same = size == proof.get("bytes")
            same = same and hashlib.file_digest(file, "sha256").hexdigest() == proof.get("sha256")
        if not same:
            raise self._refused("the file exists, and has been changed since it was written")
        # A kill may have prevented their removal.
        shutil.rmtree(self.folder, ignore_errors=True)

    def _refused(self, text: str, lines: Iterable[str] = ()) -> UsageError:
        return UsageError(
            f"--predict {self.path}: {text}; name another file, or remove this one"
            + "".join(f"\n  {line}" for line in lines)
        )

    def _check_command(self) -> None:
        """Refuse parts that another command has made; else record this command."""
        try:
            there = untrusted.read_object(self.folder / COMMAND)
        except FileNotFoundError:
            if next(self.folder.glob("part-*"), None):
                raise UsageError(
                    f"--predict {self.path}: {self.folder} has no {COMMAND}, so the origin of its "
                    "parts is unknown; remove it to start from the beginning"
                ) from None
            write_atomically(self.folder / COMMAND, dump(self._command, indent=2) + "\n")
            return
        except ValueError as error:
            raise UsageError(
                f"--predict {self.path}: {self.folder / COMMAND} is damaged ({error}); remove "
                f"{self.folder} to start from the beginning"
            ) from None
        if lines := differences(there, self._command):
            raise UsageError(
                f"--predict {self.path}: {self.folder} holds parts of another command, which "
                "cannot be combined with this one's; run that command again to continue, or remove "
                f"{self.folder} to start from the beginning:\n"
                + "\n".join(f"  {line}" for line in lines)
            )

    def _is_whole(self, part: int) -> bool:
        """Whether a part exists and has a line for each of its samples."""
        samples = self.partition.samples_of(self.partition.batches_of(part))
        try:
            with os.fdopen(untrusted.open_file(self._part(part)), "rb") as file:
                count, line = 0, b""
                for line in file:  # noqa: B007  # the last one is looked at
                    count += 1
            last = untrusted.json_object(line)
        except FileNotFoundError:
            return False
        except ValueError:
            return False
        return count == len(samples) and last.get("index") == samples[-1]

    def _blocks(self) -> Iterator[bytes]:
        for part in range(self.partition.parts):
            with os.fdopen(self._open(self._part(part)), "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

    def _open(self, path: Path) -> int:
        until_s = time.monotonic() + VISIBLE_S
        while True:
            try:
                return untrusted.open_file(path)
            except FileNotFoundError:
                if time.monotonic() > until_s or not self.folder.is_dir():
                    raise
                time.sleep(0.5)

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {self.path}: {error.filename or self.folder}: {error.strerror}; "
            f"finished parts stay in {self.folder}: fix this, then start again to continue"
        )
