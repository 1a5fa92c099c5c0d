"""What people see of torchrun's way to stop, and what its reports say."""

import pytest

from toolkit.runs.records.log_reader import LogFilter, LogView
from toolkit.supervisor.evidence.torchrun_report import read_reports

STOPPED = """\
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.api.SignalException: Process 51 got signal: 15"""

FAILED = """\
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================"""


def shown(text: str) -> str:
    return "\n".join(LogFilter(LogView()).shown(text.split("\n"), ended=True))


def test_a_traceback_of_being_stopped_is_left_out() -> None:
    assert shown(f"before\n{STOPPED}\nafter") == "before\nafter"
    assert shown(STOPPED) == ""


def test_two_nodes_mixed_are_left_out_too() -> None:
    mixed = [
        line for pair in zip(STOPPED.split("\n"), STOPPED.split("\n"), strict=True) for line in pair
    ]
    assert shown("\n".join(["before", *mixed, "after"])) == "before\nafter"


def test_log_lines_in_between_are_shown_and_end_nothing() -> None:
    first, *rest = STOPPED.split("\n")
    log = ["W1120 18:18:11.860000 114 torch/x.py:1] closing signal", "[rank 0] stopped", "srun: x"]
    mixed = [first, log[0], *rest[:2], log[1], *rest[2:-1], log[2], rest[-1]]
    assert shown("\n".join(["before", *mixed, "after"])) == "\n".join(["before", *log, "after"])


@pytest.mark.parametrize("prefix", ["", "[rank 3] "])
def test_addresses_without_a_name_are_not_shown(prefix: str) -> None:
    """c10d warns of each connection, which fills the logs of clusters without reverse names."""
    text = "[c10d] The hostname of the client socket cannot be retrieved. err=-3"
    noise = f"{prefix}[W1122 13:00:00.123456789 socket.cpp:767] {text}"
    first, *rest = STOPPED.split("\n")
    assert shown("\n".join(["a", noise, first, noise, *rest, "b"])) == "a\nb"
    assert shown(f"it says: {noise}") == f"it says: {noise}"


def test_every_other_traceback_stays_whole() -> None:
    assert shown(f"before\n{FAILED}\nafter") == f"before\n{FAILED}\nafter"
    ranks = "[rank 1] Traceback (most recent call last):\n[rank 1]   File\n  indented\n\nend"
    assert shown(ranks) == ranks


def report(host: str, rank: int, exitcode: str) -> list[str]:
    return [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_23:47:20",
        f"  host      : {host}.example.org",
        f"  rank      : {rank} (local_rank: {rank % 2})",
        f"  exitcode  : {exitcode} (pid: 26749)  (SIGKILL)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 26749",
    ]


def test_reports_of_two_nodes_that_are_mixed_are_told_apart() -> None:
    both = zip(report("node1", 0, "-9"), report("node2", 3, "1"), strict=True)
    found = read_reports(["before", *(line for pair in both for line in pair)])
    shown = [(said.host, said.rank, said.local_rank, said.exitcode) for said in found]
    assert shown == [("node1.example.org", 0, 0, -9), ("node2.example.org", 3, 1, 1)]
    assert read_reports(report("node1", 0, "-9")[:-3]) == []  # torn
    assert read_reports(["  time      : soon", *report("node1", 0, "-9")[3:]]) == []


def test_of_two_failures_in_one_second_the_root_cause_came_first() -> None:
    """A rank that torchrun ends may answer SIGTERM with a status of its own."""
    other = ["Failures:", *report("node1", 0, "3")[1:]]
    answer, cause = read_reports([*other, *report("node1", 1, "7")])
    assert (answer.rank, cause.rank) == (0, 1)
    assert cause.time < answer.time < cause.time + 1


def test_the_c_stack_of_torchruns_warning_after_the_end_is_left_out() -> None:
    """The first node's torchrun, which holds the store, may end before the others have."""
    warning = "[W1128 15:00:00.000 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3)"
    stack = [
        "Exception raised from recvBytes at /pytorch/torch/csrc/c10d/Utils.hpp:678 "
        "(most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)",
        "frame #1: <unknown function> + 0x5f (0x7f12 in /lib/libtorch_cpu.so)",
    ]
    of_a_rank = [f"[rank 1] {line}" for line in stack]
    lines = ["[rank 0] done", warning, *stack, *of_a_rank]
    shown = list(LogFilter(LogView()).shown(lines, ended=True))
    assert shown == ["[rank 0] done", warning, *of_a_rank]
