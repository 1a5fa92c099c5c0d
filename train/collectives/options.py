"""The command line of `python -m train.collectives`; without torch."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..cli.config import nearest
from ..errors import UsageError
from ..runtime.rank import RankInfo

SIZED = (
    *("all_reduce", "broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter"),
    *("all_to_all", "send_recv"),
)
"""Collectives that move numbers, and therefore have a table of sizes."""
NAMES = (*SIZED, "barrier", "monitored_barrier")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run, and how long."""

    nproc: int | None = None
    """Processes to start on this machine; None under a launcher, which has started them."""
    only: tuple[str, ...] = NAMES
    """Which collectives."""
    sizes_bytes: tuple[int, ...] = ()
    """Bytes of the largest buffer, a line of the table each."""
    repeats: int = 20
    """Measured calls for each size; the first few before them are dropped."""
    timeout_s: int = 60
    """Seconds to wait for a rank that does not come."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help shows all flags")


def parser() -> argparse.ArgumentParser:
    """Describe the flags."""
    flags = _Parser(
        prog="python -m train.collectives",
        usage="python -m train.collectives --nproc N [flags]\n"
        "       torchrun [torchrun's flags] -m train.collectives [flags]",
        description="Show what each collective does to real tensors, check every result, and "
        "measure latency and bandwidth.",
        allow_abbrev=False,
    )
    flags.add_argument("--nproc", metavar="N", help="start N processes here, without torchrun")
    flags.add_argument("--only", metavar="NAME,…", help=f"some of: {', '.join(NAMES)}")
    flags.add_argument("--sizes", metavar="SIZE,…", help="sizes to measure, such as 4KiB,1MiB")
    flags.add_argument(
        "--max-size",
        metavar="SIZE",
        help="measure 1 KiB, 4 KiB, 16 KiB … up to this (default: 64MiB); 0: measure nothing",
    )
    flags.add_argument("--repeats", metavar="N", help="measured calls per size (default: 20)")
    flags.add_argument("--timeout-s", metavar="N", help="wait so long for a rank (default: 60)")
    return flags


def parse(argv: Sequence[str], rank_info: RankInfo) -> Options:
    """Read the command line.

    Raises:
        UsageError: a flag or a value is not known, or there are fewer than two ranks.
    """
    flags_parser = parser()
    values, unknown = flags_parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        flags = [flag for action in flags_parser._actions for flag in action.option_strings]
        raise UsageError(f"unknown flag {word!r}{nearest(word, flags)}; --help shows all flags")
    nproc = _whole("--nproc", values.nproc)
    if nproc and rank_info.launched:
        raise UsageError(
            f"--nproc {nproc}: a launcher has started {rank_info.world_size} ranks already; leave "
            "it out, or start without the launcher"
        )
    if rank_info.launched and not (rank_info.addressed or rank_info.meeting):
        raise UsageError(
            "RANK is set, but not where the ranks meet: set MASTER_ADDR and MASTER_PORT, or let "
            "torchrun do so"
        )
    ranks = rank_info.world_size if rank_info.launched else nproc
    if ranks is None or ranks < 2:
        raise UsageError(
            f"ranks that talk need at least 2, here is {ranks or 1}: start them with `python -m "
            "train.collectives --nproc 2`, or with `torchrun --nproc-per-node 2 -m "
            "train.collectives`"
        )
    if values.sizes and values.max_size:
        raise UsageError("--sizes and --max-size both say what to measure: give one of them")
    only = NAMES if values.only is None else values.only.split(",")
    for name in only:
        if name not in NAMES:
            names = ", ".join(NAMES)
            raise UsageError(f"--only: unknown {name!r}{nearest(name, NAMES)} (known: {names})")
    return Options(
        nproc=nproc,
        only=tuple(name for name in NAMES if name in only),
        sizes_bytes=_sizes(values.sizes, values.max_size or "64MiB"),
        repeats=_whole("--repeats", values.repeats) or Options.repeats,
        timeout_s=_whole("--timeout-s", values.timeout_s) or Options.timeout_s,
    )


def _whole(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise UsageError(f"{flag} {text!r}: must be a whole number, at least 1")
    return int(text)


def _bytes(flag: str, text: str) -> int:
    """Read `64MiB`, `4KiB` or `512`.

    >>> _bytes("--max-size", "4KiB")
    4096
    """
    match = re.fullmatch(r"([0-9]+) ?([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise UsageError(f"{flag} {text!r}: write a size as 4KiB, 64MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _sizes(sizes: str | None, max_size: str) -> tuple[int, ...]:
    if sizes is not None:
        chosen = tuple(_bytes("--sizes", size) for size in sizes.split(","))
        if 0 in chosen:
            raise UsageError(f"--sizes {sizes!r}: a size must be at least one byte")
        return chosen
    most = _bytes("--max-size", max_size)
    # 1 KiB, 4 KiB, 16 KiB …
    return tuple(size for power in range(10, most.bit_length(), 2) if (size := 1 << power) <= most)
