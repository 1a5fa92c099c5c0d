"""What people see of torchrun's way to stop."""

from toolkit.launchers.torchrun_log import without_stop_traces

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
    return "\n".join(without_stop_traces(iter(text.split("\n"))))


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


def test_every_other_traceback_stays_whole() -> None:
    assert shown(f"before\n{FAILED}\nafter") == f"before\n{FAILED}\nafter"
    ranks = "[rank 1] Traceback (most recent call last):\n[rank 1]   File\n  indented\n\nend"
    assert shown(ranks) == ranks
