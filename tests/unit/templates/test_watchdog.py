"""The watchdog beside torchrun: whom it names, and when it takes a run for stalled."""

import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import Until
from tests.support.watchdog import program, start_rank, write_site

RECORDED = Path(__file__).parents[2] / "data/recorded"
WAITS = [["/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"]]
TRAINS = [["/home/me/train.py", 41, "load"], ["/home/me/train.py", 80, "<module>"]]


@pytest.fixture(scope="module")
def watchdog() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "stragglers", program("stragglers"))
        yield program("watchdog")


def rank(
    number: int, last: int = 0, *, stack: Any = WAITS, state: str = "S", waits: bool = False
) -> dict[str, Any]:
    """Return what is found of a rank that has begun so many collectives of the default group."""
    newest = {"number": last, "name": "all_reduce", "waits": waits, "open": None, "started": False}
    collectives = {"0": newest} if last else {}
    found = {"rank": number, "pid": 100 + number, "state": state, "collectives": collectives}
    return {**found, "stack": stack, "threads": [], "waits": waits}


def entry(
    number: int, name: str, *, retired: bool = False, state: str = "scheduled"
) -> dict[str, Any]:
    """Return an entry of torch's record."""
    which = {"collective_seq_id": number, "process_group": ["0", "default_pg"], "is_p2p": False}
    sizes = {"profiling_name": name, "input_sizes": [[3]], "input_dtypes": ["Float"]}
    return {**which, **sizes, "state": state, "retired": retired}


# ---- Who keeps the others waiting


def test_a_stopped_process_is_named_before_all_others(watchdog: ModuleType) -> None:
    found = [rank(0, 7), rank(1, 6, state="T", stack=[]), rank(2, 7)]
    assert list(watchdog.culprits_of(found)) == [1]


def test_who_lacks_a_collective_of_its_group_is_named(watchdog: ModuleType) -> None:
    found = [rank(0, 7), rank(1, 6, stack=TRAINS), rank(2, 7)]
    culprits = watchdog.culprits_of(found)
    assert culprits == {1: "has not joined all_reduce 7 of process group 0"}
    nodes = {0: "n1", 1: "n2", 2: "n2"}
    assert watchdog.in_words(culprits, found, nodes, 4) == (
        "rank 1 on n2 has not joined all_reduce 7 of process group 0; it stands at "
        "/home/me/train.py:41 in load; no answer from rank 3"
    )


def test_groups_of_some_ranks_are_compared_among_their_members(watchdog: ModuleType) -> None:
    found = [rank(number, 5) for number in range(4)]
    for number, last in ((0, 3), (1, 2)):
        found[number]["collectives"]["17"] = {
            **rank(0, last)["collectives"]["0"],
            "name": "all_gather",
        }
    assert watchdog.culprits_of(found) == {1: "has not joined all_gather 3 of process group 17"}


def test_who_never_joins_the_default_group_is_named(watchdog: ModuleType) -> None:
    assert list(watchdog.culprits_of([rank(0, 1), rank(1, stack=TRAINS), rank(2, 1)])) == [1]


def test_who_has_not_answered_is_not_taken_for_behind(watchdog: ModuleType) -> None:
    found = [rank(0, 700), {**rank(1), "collectives": None}, rank(2, 700)]
    assert watchdog.culprits_of(found) == {}


def test_who_waits_in_an_earlier_collective_is_not_behind(watchdog: ModuleType) -> None:
    """On GPUs the other ranks go on and enqueue later ones, while one asks for a result."""
    found = [rank(0, 57, waits=True), rank(1, 59, waits=True), rank(2, 59, waits=True)]
    assert watchdog.culprits_of(found) == {}


def test_who_never_queues_a_collective_of_nccl_is_named(watchdog: ModuleType) -> None:
    """The backends of a group count apart: here an object went round by gloo before."""
    found = [rank(0, 3), rank(1, 3, stack=TRAINS)]
    found[0]["collectives"]["0 (nccl)"] = {**rank(0, 1, waits=True)["collectives"]["0"], "open": 1}
    lacks = "has not joined all_reduce 1 of process group 0 (nccl)"
    assert watchdog.culprits_of(found) == {1: lacks}


def test_whose_gpu_does_not_get_to_a_collective_is_named(watchdog: ModuleType) -> None:
    """Records of two ranks on a GPU, as torch has written them: both have queued the same."""
    text = (RECORDED / "nccl-kernel-hangs.json").read_text()
    records = [json.loads(text)[f"rank {number}"]["entries"] for number in (0, 1)]
    found = [
        {**rank(number, stack=TRAINS), "collectives": watchdog.collectives_of(entries)}
        for number, entries in enumerate(records)
    ]
    queued = {"number": 126, "name": "all_reduce", "waits": True, "open": 125}
    for each in found:
        each["collectives"]["0 (nccl)"].pop("kinds")
    assert [each["collectives"] for each in found] == [
        {"0 (nccl)": {**queued, "started": True}},
        {"0 (nccl)": {**queued, "started": False}},
    ]
    what = "has queued collective 125 of process group 0 (nccl), which its GPU has not begun"
    assert watchdog.culprits_of(found) == {1: what}
    # Without these times, nobody knows.
    for entry in records[0]:
        entry["state"] = "scheduled" if entry["state"] == "started" else entry["state"]
    found[0]["collectives"] = watchdog.collectives_of(records[0])
    assert watchdog.culprits_of(found) == {}


def in_collectives(
    watchdog: ModuleType, number: int, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what is found of a rank whose record has these entries."""
    line = 44 if "broadcast" in entries[-1]["profiling_name"] else 41
    found = rank(number, stack=[*WAITS, ["/home/me/train.py", line, "<module>"]])
    waits = watchdog.waits_in(entries)
    return {**found, "collectives": watchdog.collectives_of(entries), "waits": waits}


def gloo(*names: str, first: int = 6, **more: Any) -> list[dict[str, Any]]:
    """Return a record of collectives, of which the last one has not ended."""
    entries = [entry(first + n, f"gloo:{name}", retired=True) for n, name in enumerate(names)]
    entries[-1] |= {"retired": False, **more}
    return entries


def nccl(*names: str, ended: int = 0) -> list[dict[str, Any]]:
    """Return a record of collectives that a rank has queued, of which so many have ended."""
    entries = [entry(6 + n, f"nccl:{name}") for n, name in enumerate(names)]
    return [each | {"retired": n < ended} for n, each in enumerate(entries)]


REDUCE, BROADCAST = "all_reduce of 3 Float", "broadcast of 3 Float"
MISMATCHES: dict[str, tuple[list[list[dict[str, Any]]], dict[str, list[int]]]] = {
    "name": (
        [gloo("barrier", "all_reduce"), gloo("barrier", "broadcast")],
        {REDUCE: [0], BROADCAST: [1]},
    ),
    "size": (
        [gloo("barrier", "all_reduce"), gloo("barrier", "all_reduce", input_sizes=[[2, 2]])],
        {REDUCE: [0], "all_reduce of 4 Float": [1]},
    ),
    "type": (
        [gloo("barrier", "all_reduce"), gloo("barrier", "all_reduce", input_dtypes=["Half"])],
        {REDUCE: [0], "all_reduce of 3 Half": [1]},
    ),
    "a third rank has not come": (
        [
            gloo("barrier", "all_reduce"),
            gloo("barrier", "broadcast"),
            gloo("barrier", retired=True),
        ],
        {REDUCE: [0], BROADCAST: [1]},
    ),
    "the root of a broadcast has gone on": (
        [
            nccl("barrier", "broadcast", "all_reduce", ended=2),
            nccl("barrier", "all_reduce", ended=1),
        ],
        {BROADCAST: [0], REDUCE: [1]},
    ),
    "GPUs have queued more": (
        [
            nccl("barrier", "all_reduce", *["all_reduce"] * 40, ended=1),
            nccl("barrier", "broadcast", *["all_reduce"] * 20, ended=1),
        ],
        {REDUCE: [0], BROADCAST: [1]},
    ),
    "same": ([gloo("barrier", "all_reduce"), gloo("barrier", "all_reduce")], {}),
    "one has not come": ([gloo("barrier", "all_reduce"), gloo("barrier", retired=True)], {}),
    "sizes that may differ": (
        [gloo("barrier", "all_gather"), gloo("barrier", "all_gather", input_sizes=[[4]])],
        {},
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_in_different_collectives_are_found_and_none_is_blamed(
    watchdog: ModuleType, case: str
) -> None:
    records, kinds = MISMATCHES[case]
    found = [in_collectives(watchdog, number, each) for number, each in enumerate(records)]
    group = "0" if records[0][0]["profiling_name"].startswith("gloo") else "0 (nccl)"
    expected = (f"number 7 of process group {group}", kinds)
    assert watchdog.mismatch_of(found) == (expected if kinds else None)
    if kinds:
        assert watchdog.culprits_of(found) == {}


def test_different_collectives_are_told_with_the_lines_of_their_calls(watchdog: ModuleType) -> None:
    calls = ["all_reduce", "broadcast", *["all_reduce"] * 9]
    found = [in_collectives(watchdog, n, gloo("barrier", name)) for n, name in enumerate(calls)]
    nodes = dict.fromkeys(range(11), "n1") | {1: "n2"}
    assert watchdog.in_words({}, found, nodes, 11) == (
        "collective mismatch: number 7 of process group 0 is all_reduce of 3 Float on ranks 0, 2, "
        "3, 4, 5, 6, 7, 8, … (10 in all) (/home/me/train.py:41 in <module>) and broadcast of 3 "
        "Float on rank 1 on n2 (/home/me/train.py:44 in <module>)"
    )


def test_without_collectives_who_is_not_in_torch_distributed_is_named(watchdog: ModuleType) -> None:
    assert list(watchdog.culprits_of([rank(0), rank(1), rank(2, stack=TRAINS)])) == [2]


def test_where_all_stand_alike_nobody_is_named(watchdog: ModuleType) -> None:
    found = [rank(0, 7), rank(1, 7)]
    assert watchdog.culprits_of(found) == {}
    words = watchdog.in_words({}, found, {0: "n", 1: "n"}, 2)
    assert words.startswith("no rank differs from the others; they stand at ")
    assert watchdog.culprits_of([]) == {}
    assert watchdog.in_words({}, [], {}, 2).endswith("no answer from rank 0, 1")


def test_ranks_whose_stacks_change_are_busy_unless_one_keeps_the_others_waiting(
    watchdog: ModuleType,
) -> None:
    imports = [["<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"], *TRAINS]
    moved = [["/home/me/train.py", 42, "load"]]
    before, now = [rank(0, stack=TRAINS)], [rank(0, stack=moved)]
    assert watchdog.is_busy(before, now, {})
    assert not watchdog.is_busy(before, before, {})
    assert not watchdog.is_busy(before, now, {0: "lacks a collective"})
    assert watchdog.is_busy([rank(0, 6)], [rank(0, 7)], {0: "lacks a collective"})
    assert watchdog.is_busy(before, [rank(0, stack=imports)], {0: "still imports"})
    polls = [rank(0, 7, stack=stack, waits=True) for stack in (TRAINS, moved)]
    assert not watchdog.is_busy(polls[:1], polls[1:], {}), "it asks whether a collective has ended"


LOCKED = [["/usr/lib/python3.11/threading.py", 327, "wait"], *TRAINS]


@pytest.mark.parametrize(
    ("own", "others", "more", "works"),
    [
        (1.0, 0.0, {}, True),
        (0.1, 0.0, {}, False),
        (0.0, 3.0, {}, True),
        (0.0, 3.0, {"stack": LOCKED}, True),
        (1.0, 0.0, {"stack": LOCKED}, False),
        (1.0, 0.0, {"stack": LOCKED, "threads": [TRAINS]}, True),
        (1.0, 0.0, {"stack": [], "collectives": None}, True),
        (1.0, 0.0, {"waits": True}, False),
        (0.0, 3.0, {"waits": True}, False),
        (1.0, 0.0, {"state": "T"}, False),
    ],
    ids=[
        "it computes",
        "it sleeps",
        "its loader's workers compute",
        "it waits for a worker that computes",
        "it waits for a lock, and a thread of C++ spins",
        "another thread computes",
        "it computes and holds the GIL",
        "it spins in a collective",
        "it waits in a collective, and its loader reads ahead",
        "it is stopped",
    ],
)
def test_a_rank_computes_if_it_uses_a_cpu_and_waits_for_no_rank(
    watchdog: ModuleType, own: float, others: float, more: dict[str, Any], works: bool
) -> None:
    found = [rank(0, 7, waits=True), {**rank(1, 6, stack=TRAINS), "cores": [own, others], **more}]
    assert watchdog.at_work(found) == ([1] if works else [])


def test_a_gpu_that_has_not_begun_a_collective_computes(watchdog: ModuleType) -> None:
    """The process of a rank that waits for its GPU uses a whole core, whatever the GPU does."""
    text = (RECORDED / "nccl-kernel-hangs.json").read_text()
    records = [json.loads(text)[f"rank {number}"]["entries"] for number in (0, 1)]
    assert [*map(watchdog.waits_in, records)] == [True, False]
    for entries in records:  # as torch records without times
        for each in entries:
            each.pop("duration_ms", None)
            each["state"] = "scheduled" if each["state"] == "started" else each["state"]
    assert [*map(watchdog.waits_in, records)] == [True, True]
    assert not watchdog.waits_in(records[0][:2])
    assert not watchdog.waits_in([])
    one_was_joined_to_others = entry(6, "nccl:send 0->1"), entry(7, "nccl:coalesced", retired=True)
    assert not watchdog.waits_in(one_was_joined_to_others)


BURNS = """
import multiprocessing
def burn():
    while True:
        pass
if __name__ == "__main__":
    process = multiprocessing.Process(target=burn)
    process.start()
    process.join()
"""


def test_cpu_time_of_a_process_and_of_what_it_has_started_are_told_apart(
    watchdog: ModuleType, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "burns.py").write_text(BURNS)
    with subprocess.Popen([sys.executable, tmp_path / "burns.py"], start_new_session=True) as one:
        try:
            until(lambda: watchdog.cpu_seconds([one.pid])[one.pid][1] > 1, "its child has worked")
            every = watchdog.cpu_seconds([os.getpid()])[os.getpid()]
            others = watchdog.cpu_seconds([os.getpid(), one.pid])[os.getpid()]
            assert every[1] - others[1] > 1, "what a rank has started is of no other one"
        finally:
            os.killpg(one.pid, signal.SIGKILL)
    assert watchdog.cpu_seconds([one.pid]) == {one.pid: (0.0, 0.0)}


def test_a_place_is_the_innermost_line_of_ones_own_code(watchdog: ModuleType) -> None:
    stdlib = [["/usr/lib/python3.11/selectors.py", 415, "select"]]
    loader = [["/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1464, "_get_data"]]
    assert watchdog.place_of([*stdlib, *TRAINS]) == "/home/me/train.py:41 in load"
    assert watchdog.place_of([*stdlib, *loader, *TRAINS]).endswith(", waiting for a data loader")
    assert watchdog.place_of(stdlib) == "/usr/lib/python3.11/selectors.py:415 in select"
    assert watchdog.place_of([]) == ""


# ---- When a run is stalled


class Clocked:
    """A run whose steps and output are written by the test, at the test's times."""

    def __init__(self, watchdog: ModuleType, folder: Path, limit_s: float | None) -> None:
        self.folder = folder
        self.logs = folder / "logs/attempt-0"
        self.rank_logs = self.logs / "node-0/id/attempt_0/0"
        self.rank_logs.mkdir(parents=True)
        self.signs = watchdog.Signs(folder, self.logs, limit_s)
        self.signs.begin([{"error_file": str(self.rank_logs / "error.json")}], now=0.0)

    def step(self) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n")

    def event(self, name: str) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": name}) + "\n")

    def silent_s(self, now: float) -> float | None:
        self.signs.look(now)
        found: float | None = self.signs.silent_s(now)
        return found


@pytest.fixture
def clocked(watchdog: ModuleType, tmp_path: Path) -> Any:
    return lambda limit_s=None: Clocked(watchdog, tmp_path, limit_s)


def test_ten_thousand_steps_with_jitter_are_no_stall(clocked: Any) -> None:
    run, now, chance = clocked(60.0), 0.0, random.Random(7)
    for _ in range(10_000):
        now += 50 * chance.uniform(0.95, 1.05)
        run.step()
        assert run.silent_s(now) is None
    assert run.silent_s(now + 59) is None
    assert run.silent_s(now + 60) == pytest.approx(60)


def test_a_limit_is_learned_from_the_longest_gap_between_steps(clocked: Any) -> None:
    run, now = clocked(), 0.0
    assert run.silent_s(1e6) is None, "nothing is learned before the first steps"
    run.signs.begin([], now=0.0)
    for number in range(40):
        now += 90 if number == 30 else 2
        run.step()
        assert run.silent_s(now) is None
    assert run.silent_s(now + 899) is None
    assert run.silent_s(now + 900) == pytest.approx(900)


def test_a_learned_limit_is_at_least_five_minutes(clocked: Any) -> None:
    run = clocked()
    for number in range(40):
        run.step()
        assert run.silent_s(number / 100) is None
    assert run.silent_s(299) is None
    assert run.silent_s(301) is not None


def test_output_of_any_rank_counts_until_there_are_steps(clocked: Any) -> None:
    run = clocked(100.0)
    (run.rank_logs / "stdout.log").write_text("here\n")
    assert run.silent_s(90) is None
    elsewhere = run.logs / "node-1/id/attempt_0/1"
    elsewhere.mkdir(parents=True)
    assert run.silent_s(120) is None, "looks at the other nodes' logs from time to time"
    (elsewhere / "stderr.log").write_text("there\n")
    assert run.silent_s(180) is None
    assert run.silent_s(279) is None
    run.step()
    assert run.silent_s(300) is None
    (run.rank_logs / "stdout.log").write_text("printed on and on\n")
    assert run.silent_s(400) == pytest.approx(100), "from the first step on, only steps count"


@pytest.mark.parametrize("event", ["evaluation", "compilation"])
def test_an_evaluation_and_a_compilation_are_no_stall(clocked: Any, event: str) -> None:
    run = clocked(60.0)
    run.step()
    assert run.silent_s(1) is None
    run.event(event)
    assert run.silent_s(500) is None
    run.event("epoch")
    assert run.silent_s(559) is None, "a step may take its whole time after it"
    assert run.silent_s(560) == pytest.approx(60)


def test_a_step_ends_a_pause(clocked: Any) -> None:
    run = clocked(60.0)
    run.event("compilation")
    assert run.silent_s(500) is None
    os.utime(run.folder / "events.jsonl", (1, 1))
    run.step()
    assert run.silent_s(501) is None
    assert run.silent_s(561) == pytest.approx(60)


def test_torn_and_foreign_events_are_no_pause(clocked: Any) -> None:
    run = clocked(60.0)
    for text in ("[]", "{", "evaluation", '{"event": ["evaluation"]}', "", "[" * 5000):
        (run.folder / "events.jsonl").write_text(text)
        assert not run.signs.pauses()


# ---- What follows

SLEEPS = {**rank(1, 6, stack=TRAINS), "cores": [0.0, 0.0]}
COMPUTES = {**SLEEPS, "cores": [0.9, 0.0]}


@pytest.mark.parametrize(
    ("limit_s", "silent_s", "other", "ended", "said"),
    [
        (60.0, 60.0, SLEEPS, [1], "has not joined all_reduce 7"),
        (60.0, 60.0, COMPUTES, None, "(/home/me/train.py:41 in load) computes; no rank is killed"),
        (60.0, 3599.0, COMPUTES, None, "no rank is killed before 3600 s"),
        (60.0, 3600.0, COMPUTES, [1], "has not joined all_reduce 7"),
        (600.0, 5999.0, COMPUTES, None, "no rank is killed before 6000 s"),
        (600.0, 6000.0, COMPUTES, [1], "has not joined all_reduce 7"),
        (None, 300.0, COMPUTES, [], "has not joined all_reduce 7"),
    ],
)
def test_a_limit_ends_who_waits_and_only_names_who_computes(
    limit_s: float | None,
    silent_s: float,
    other: dict[str, Any],
    ended: list[int] | None,
    said: str,
    watchdog: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is ended where the limit is learned; the watchdog looks again where a rank computes."""
    exchange = tmp_path / "logs/attempt-0/watchdog"
    one = watchdog.Watchdog(tmp_path, exchange.parent, limit_s, select.poll())
    found, nodes = [rank(0, 7, waits=True), other], {0: "n1", 1: "n2"}
    monkeypatch.setattr(one, "ask_all", lambda name, world: (found, nodes))
    one.before, since = found, one.signs.since
    assert one.name_stall(silent_s, 2) is (ended is not None)
    (line,) = map(json.loads, (exchange / "stalls.jsonl").read_text().splitlines())
    assert (line["ranks"], line["kills"]) == ([1], bool(ended))
    assert line["why"].startswith(f"no output for {silent_s:.0f} s: rank 1 on n2 ")
    assert said in line["why"]
    pids = [read["pids"] for read in map(watchdog.read_json, exchange.glob("end-*.json"))]
    assert pids == ([{"1": 101}] if ended else [])
    assert [*exchange.glob("stall-[0-9]")] == ([] if ended is None else [exchange / "stall-1"])
    if ended is None:
        assert one.signs.silent_since > since, "the limit begins anew"
        assert one.name_stall(silent_s, 2) is False
        assert len((exchange / "stalls.jsonl").read_text().splitlines()) == 1


def test_a_rank_that_has_computed_and_hangs_is_ended(
    watchdog: ModuleType, hanging: dict[str, Any], site: Path
) -> None:
    """What its processes have used since the older of two looks counts, half a limit apart."""
    logs = site / "run/logs/attempt-0"
    one = watchdog.Watchdog(site / "exchange", logs, 60.0, select.poll())

    def cores() -> float:
        one.answer("stall-1")
        (answer,) = map(watchdog.read_json, (logs / "watchdog").glob("answer-stall-1-*"))
        found: float = answer["ranks"][0]["cores"][0]
        return found

    one.used = [(one.looked - 40, {}), (one.looked - 31, {hanging["pid"]: (1e6, 0.0)})]
    one.look()
    assert one.used[0] == (one.looked - 31, {hanging["pid"]: (1e6, 0.0)})
    assert cores() == 0.0
    one.used[0] = one.looked - 31, {hanging["pid"]: (-1e6, 0.0)}
    assert cores() > 1
    one.looked -= 1000
    one.look()
    assert one.used[0][0] > one.looked + 900, "nor does a suspension count"


# ---- In a rank


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as the scripts write it, and a sitecustomize of the user's in another one."""
    return write_site(tmp_path)


def test_a_rank_loads_the_users_own_sitecustomize_and_no_module_of_ours(site: Path) -> None:
    script = "import sitecustomize, sys; print(sitecustomize.LOADED, *sys.path)"
    out, err = start_rank(site, script).communicate(timeout=60)
    assert (out.split()[0], err) == ("theirs", "")
    assert str(site / "site") not in out.split()
    assert json.loads((site / "exchange/3.json").read_text())["world"] == 4


def test_children_of_a_rank_and_other_programs_are_left_alone(site: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'], check=True)"
    start_rank(site, child).communicate(timeout=60)
    pid = json.loads((site / "exchange/3.json").read_text())["pid"]
    assert f"-{pid}.socket" in (site / "exchange/3.json").read_text(), "not of its child"
    (site / "exchange/3.json").unlink()
    process = start_rank(site, "print('fine')", LOCAL_RANK="")
    assert process.communicate(timeout=60) == ("fine\n", "")
    assert not (site / "exchange/3.json").exists()


def test_a_folder_that_cannot_be_written_costs_only_the_stacks(site: Path) -> None:
    process = start_rank(site, "print('fine')", TRAIN_WATCHDOG=str(site / "missing"))
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("fine\n", 0)
    assert err.startswith("torch-deploy-toolkit: this rank is not prepared: ")


RUN = "/runs/digits-1127-050000-ab3d"


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ({"RANK": "0", "TRAIN_RUN_DIR": RUN}, "digits-1127-050000-ab3d allow None"),
        ({"TRAIN_RUN_DIR": RUN}, "digits-1127-050000-ab3d-rank-3 allow None"),
        (
            {"RANK": "0", "TRAIN_RUN_DIR": f"{RUN}/lr=0.1"},
            "digits-1127-050000-ab3d.lr=0.1 allow digits-1127-050000-ab3d",
        ),
        ({"RANK": "0", "TRAIN_RUN_DIR": "/home/me/first/"}, "me.first allow None"),
        ({"WANDB_RUN_ID": "mine"}, "mine None None"),
        ({"WANDB_RESUME": "never"}, "None never None"),
        ({"WANDB_SWEEP_ID": "ours"}, "None None None"),
    ],
)
def test_a_run_of_wandb_goes_on_over_all_starts(
    site: Path, more: dict[str, str], printed: str
) -> None:
    names = "('WANDB_RUN_ID', 'WANDB_RESUME', 'WANDB_RUN_GROUP')"
    process = start_rank(site, f"import os; print(*[os.environ.get(n) for n in {names}])", **more)
    assert process.communicate(timeout=60) == (f"{printed}\n", "")


@pytest.fixture
def hanging(site: Path) -> Iterator[dict[str, Any]]:
    """A rank that holds the GIL and never lets go of it."""
    hang = (
        "import itertools\ndef hang():\n    print(flush=True)\n    sum(itertools.repeat(0))\nhang()"
    )
    with start_rank(site, hang) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            yield json.loads((site / "exchange/3.json").read_text())
        finally:
            process.kill()


def test_the_stack_of_a_rank_that_holds_the_gil_is_read(
    watchdog: ModuleType, hanging: dict[str, Any], site: Path
) -> None:
    found = watchdog.examine(hanging, site / "exchange")
    assert [frame[2] for frame in found["stack"]] == ["hang", "<module>"]
    assert found["collectives"] is None
    assert found["state"] in ("S", "R")


RECORDS = """
import json, sys, time, types
def recorder(name):
    entry = {"collective_seq_id": 9, "process_group": ["0", "default_pg"], "is_p2p": False,
             "profiling_name": name, "state": "scheduled", "retired": False}
    record = {"version": "2.10"} | ({"entries": [entry]} if name else {})
    return lambda: json.dumps(record).encode()
torch = sys.modules["torch._C._distributed_c10d"] = types.ModuleType("recorders")
torch._dump_fr_trace_json = recorder(sys.stdin.readline().strip())
torch._dump_nccl_trace_json = recorder("nccl:all_reduce")
print(flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("gloo", ["gloo:broadcast", ""])
def test_the_records_of_both_gloo_and_nccl_are_read(
    gloo: str, watchdog: ModuleType, site: Path
) -> None:
    """A torch for GPUs has a recorder of its own for NCCL; gloo's has no entries without gloo."""
    with start_rank(site, RECORDS) as process:
        try:
            assert process.stdin and process.stdout
            process.stdin.write(f"{gloo}\n")
            process.stdin.flush()
            process.stdout.readline()
            rank = json.loads((site / "exchange/3.json").read_text())
            found = watchdog.examine(rank, site / "exchange")["collectives"]
        finally:
            process.kill()
    expected = {"0": "broadcast", "0 (nccl)": "all_reduce"}
    if not gloo:
        del expected["0"]
    assert {key: each["name"] for key, each in found.items()} == expected


FORKS = """
import os, sys, threading
if os.fork() == 0:
    sys.exit(0)
os.wait()
print("parent lives", threading.active_count(), flush=True)
sys.stdin.readline()
"""


def test_a_rank_that_forks_lives_on_and_answers(watchdog: ModuleType, site: Path) -> None:
    process = start_rank(site, FORKS)
    assert process.stdout and process.stdout.readline() == "parent lives 1\n"
    place = json.loads((site / "exchange/3.json").read_text())
    found = watchdog.examine(place, site / "exchange")
    assert [frame[2] for frame in found["stack"]] == ["<module>"]
    assert (found["threads"], found["collectives"]) == ([], None)
    assert process.communicate("\n", timeout=60) == ("", "")
    assert process.returncode == 0


def test_a_folder_that_all_nodes_share_is_listed_only_after_a_change(
    watchdog: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may know whole seconds: what comes at the time of another change is seen."""
    logs, now = tmp_path / "logs/attempt-0", [100.0]
    one = watchdog.Watchdog(tmp_path, logs, None, select.poll())
    listed: list[Path] = []
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def ask(name: str) -> None:
        (logs / "watchdog" / name).touch()
        os.utime(logs / "watchdog", (5, 5))

    ask("ask-1")
    assert one.new_files() == ["ask-1"]
    ask("end-2.json")
    ask("answer-1-n1-7.json")
    ask("end-3.json.77")
    now[0] += 2
    assert one.new_files() == ["end-2.json"]
    count = len(listed)
    for _ in range(30):
        now[0] += 4
        assert one.new_files() == []
    assert len(listed) == count
    (logs / "watchdog/ask-4").touch()
    assert one.new_files() == ["ask-4"]
    shutil.rmtree(tmp_path)
    assert one.new_files() == []


def test_after_a_suspension_the_limit_begins_anew(
    watchdog: ModuleType, hanging: dict[str, Any], site: Path
) -> None:
    started = watchdog.Watchdog(site / "exchange", site / "run/logs/attempt-0", 60.0, select.poll())
    began = started.signs.last
    started.looked -= 1000
    started.look()
    assert started.signs.last >= began + 1000


@pytest.mark.parametrize(
    ("limit_s", "waited_s"), [(None, 2.0), (60.0, 2.0), (3.0, 0.75), (0.1, 0.3)]
)
def test_the_first_look_at_a_rank_that_does_not_answer_is_over_before_the_limit(
    limit_s: float | None,
    waited_s: float,
    watchdog: ModuleType,
    hanging: dict[str, Any],
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    def examine(rank: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
        waited.append(timeout_s)
        return {"threads": [], "collectives": None}

    monkeypatch.setattr(watchdog, "examine", examine)
    logs = site / "run/logs/attempt-0"
    started = watchdog.Watchdog(site / "exchange", logs, limit_s, select.poll())
    for _ in range(2):
        started.examined(hanging, site / "exchange")
    assert waited == [waited_s, 0.3]


def test_a_later_process_of_the_same_number_is_no_rank(
    watchdog: ModuleType, hanging: dict[str, Any]
) -> None:
    assert watchdog.is_alive(hanging)
    assert not watchdog.is_alive({**hanging, "began": "1"})
    assert not watchdog.is_alive({**hanging, "pid": 1 << 22})
    assert not watchdog.is_alive({})


@pytest.mark.parametrize("described", [True, False])
def test_an_end_is_noticed_with_and_without_descriptors_of_processes(
    watchdog: ModuleType, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    """Those came with Python 3.9 and Linux 5.3."""
    if not described:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["sleep", "1000"])
    try:
        ending = watchdog.Ending(process.pid)
        assert ending.has_descriptor is described
        assert not ending.poll(1)
    finally:
        process.kill()
    assert ending.poll(300_000)
    process.wait()


def test_what_was_asked_of_an_earlier_start_is_left_alone(
    watchdog: ModuleType, hanging: dict[str, Any], site: Path, until: Until
) -> None:
    """In a pod, a rank that was started again may have the process id of the one before."""
    logs = site / "run/logs/attempt-0"
    (logs / "watchdog").mkdir(parents=True)
    end = json.dumps({"why": "old", "pids": {"3": hanging["pid"]}})
    (logs / "watchdog/end-1.json").write_text(end)
    (logs / "watchdog/ask-1").touch()
    started = watchdog.Watchdog(site / "exchange", logs, 60.0, select.poll())
    started.look()
    assert watchdog.is_alive(hanging)
    assert not [*(logs / "watchdog").glob("answer-*")]
    (logs / "watchdog/end-2.json").write_text(end)
    started.look()
    until(lambda: not watchdog.is_alive(hanging), "the kernel ends it")
    assert json.loads(Path(hanging["error_file"]).read_text())["message"]["message"] == (
        "StallError: old"
    )


def test_only_ranks_that_cannot_be_looked_into_are_told(
    watchdog: ModuleType,
    site: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not so before torchrun has started them, nor while their Python starts."""
    monkeypatch.setattr(watchdog, "UNSEEN_S", 0.0)
    logs = site / "run/logs/attempt-0"
    # A torchrun that starts its rank when it is told to; the test's own process may have children.
    argv = ["sh", "-c", "read _; sleep 300 & echo; wait"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torchrun:
        assert torchrun.stdin is not None and torchrun.stdout is not None
        started = watchdog.Watchdog(site / "exchange", logs, 0.0, select.poll(), torchrun.pid)
        for _ in range(3):
            started.look()
        torchrun.stdin.write(b"\n")
        torchrun.stdin.flush()
        torchrun.stdout.readline()
        (rank,) = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        try:
            started.look()
            assert capsys.readouterr().err == ""
            for _ in range(3):
                started.look()
        finally:
            os.kill(int(rank), signal.SIGKILL)
            torchrun.kill()
    assert capsys.readouterr().err.count("a stall would not be noticed") == 1


def test_a_process_that_does_not_handle_the_signal_is_not_signalled(
    watchdog: ModuleType, site: Path
) -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        place = {"rank": 3, "pid": process.pid, "signal": 54, "thread": 1, "socket": "/none"}
        found = watchdog.examine(place, site / "exchange")
        assert (found["stack"], found["collectives"], process.poll()) == ([], None, None)
        process.kill()


IN_BACKGROUND = """
import os, sys
os.system(f"{sys.executable} -c 'print(\\"uploads\\", flush=True)' &")
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def test_a_program_in_the_background_of_a_shell_is_no_rank(tmp_path: Path) -> None:
    """The shell has ended, so the rank is not among its ancestors."""
    with start_rank(write_site(tmp_path), IN_BACKGROUND) as rank:
        assert rank.stdout is not None
        assert {rank.stdout.readline() for _ in range(2)} == {f"{rank.pid}\n", "uploads\n"}
        assert json.loads((tmp_path / "exchange/3.json").read_text())["pid"] == rank.pid
        rank.communicate("\n")


STARTS_ITSELF_AGAIN = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
print("again", flush=True)
sys.stdin.readline()
"""


def test_a_rank_that_starts_itself_again_can_be_examined(tmp_path: Path) -> None:
    site = write_site(tmp_path)
    with start_rank(site, STARTS_ITSELF_AGAIN) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        assert rank.stdout.readline() == "again\n"
        place = json.loads((tmp_path / "exchange/3.json").read_text())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(place["socket"])
        rank.communicate("\n")
