"""The kernel's count of processes that it has killed, and what ranks have used."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import Until
from toolkit.supervisor.evidence.memory import Rank, oom_kills, peak_kb, ranks_below

V2 = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 9\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "files", "kills"),
    [
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/step_0/memory.events": V2.format(2)}, 2),
        (
            "9:cpu,cpuacct:/slurm/job_7\n5:memory:/slurm/job_7\n0::/\n",
            {"memory/slurm/job_7/memory.oom_control": V1.format(1)},
            1,
        ),
        # A container may see its own cgroup as the root, and be told the node's path.
        ("0::/\n", {"memory.events": V2.format(4)}, 4),
        ("5:memory:/kubepods/x\n", {"memory/memory.oom_control": V1.format(1)}, 1),
        # A name of a cgroup may hold anything.
        ("0::/a:b c\n", {"a:b c/memory.events": V2.format(5)}, 5),
        ("0::/gone\n", {}, 0),
        ("0::/x\n", {"x/memory.events": "oom_kill many\noom_kill\n\0"}, 0),
        ("", {"memory.events": V2.format(4)}, 0),
        ("no cgroups here\n:\n", {}, 0),
    ],
)
def test_kills_for_want_of_memory_are_read_from_cgroups_of_both_versions(
    tmp_path: Path, membership: str, files: dict[str, str], kills: int
) -> None:
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    own.write_text(membership)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True)
        (mount / name).write_text(text)
    assert oom_kills(str(own), str(mount)) == kills


def test_this_process_has_a_count() -> None:
    assert oom_kills() >= 0
    assert oom_kills("/proc/none", "/proc/none") == 0


def test_ranks_are_found_below_torchrun_with_the_processes_that_they_start(until: Until) -> None:
    start = "RANK=3 TORCHELASTIC_RESTART_COUNT=2 sh -c 'sleep 60 & echo $$ $!; wait' & wait"
    with subprocess.Popen(["sh", "-c", start], stdout=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stdout is not None
        rank, helper = map(int, torchrun.stdout.readline().split())
        try:
            expected = {Rank(rank, "3", 2), Rank(helper, "3", 2)}
            # In the middle of execve(2) the environment of a process reads as empty.
            until(lambda: {*ranks_below([torchrun.pid])} == expected, "both are found")
            assert peak_kb(rank) > 100
        finally:
            for pid in (rank, helper):
                os.kill(pid, 9)
    assert list(ranks_below([torchrun.pid])) == []
    assert peak_kb(torchrun.pid) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who makes PID namespaces")
def test_a_proxy_in_a_container_leads_to_its_rank(until: Until) -> None:
    """It knows the pid of its rank in the container's PID namespace."""
    script = "env -u RANK sleep 1d & printf for-$! >/proc/self/comm; wait"
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        env={"PATH": os.environ["PATH"], "RANK": "3"},
    )
    try:
        until(lambda: "sleep" in commands_of(ranks_below([container.pid])), "the rank is found")
        (rank,) = [one for one in ranks_below([container.pid]) if one.pid != container.pid]
        assert rank.number == "3"
    finally:
        container.kill()
        container.wait()


def commands_of(ranks: Iterable[Rank]) -> list[str]:
    return [Path(f"/proc/{rank.pid}/comm").read_text().strip() for rank in ranks]
