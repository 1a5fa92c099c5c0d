"""Up and down: again, halfway, twice at once, and without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .conftest import SANDBOX, Sandbox, wait_until

pytestmark = pytest.mark.slurm

SMALL = ("--nodes=2", "--cpus=2", "--gpus=0", "--memory=2048")


@pytest.fixture
def other() -> Iterator[Sandbox]:
    """A second sandbox that is not up yet."""
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def running(path: Path) -> list[str]:
    """Command lines of all processes that have to do with a directory, or with its namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(f"{path}/") in text.replace(b"\0", b"/"):
                found.append((entry / "cmdline").read_text())
    return found


def starts(pids: Iterable[int]) -> set[tuple[int, str]]:
    """Return those of the processes that are there, each with its time of start.

    A number alone may soon be another process's.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            found.add((pid, stat.rpartition(")")[2].split()[19]))
    return found


def test_down_leaves_no_process_no_mount_and_only_logs(fresh: Sandbox) -> None:
    fresh.run("up", *SMALL)
    # A job, and a srun that waits outside of the nodes.
    fresh.submit("#!/bin/sh\nsleep 1000\n", "--mem=1G")
    waiting = subprocess.Popen(
        [fresh.dir / "bin" / "srun", "--mem=1G", "sleep", "1000"],
        env=fresh.env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: sum(e["command"].endswith("sleep 1000") for e in fresh.jobs_processes()) == 2,
            "both jobs to run",
        )
        pids = fresh.status()["pids"]
        assert set(pids) == {"controller", "node1", "node2"}
        recorded = starts(pids.values())
        fresh.run("down")
        waiting.wait(timeout=300)
    finally:
        waiting.kill()
        waiting.wait()
    # The system takes some milliseconds to bury the dead.
    wait_until(
        lambda: not recorded & starts(pids.values()),
        "all recorded processes to be gone",
    )
    wait_until(lambda: running(fresh.dir) == [], "all others to be gone")
    assert str(fresh.dir) not in Path("/proc/self/mountinfo").read_text()
    assert sorted(path.name for path in fresh.dir.iterdir()) == [".gitignore", "bin", "logs"]
    assert (fresh.dir / "logs" / "slurmctld.log").stat().st_size > 0
    assert fresh.run("down").stdout == f"nothing to take down in {fresh.dir}\n"
    assert fresh.status()["up"] is False


def test_up_is_idempotent_and_refuses_another_shape(fresh: Sandbox) -> None:
    fresh.run("up", *SMALL)
    pids = fresh.status()["pids"]
    assert fresh.run("up", *SMALL).stdout == f"already up: 2 nodes, state in {fresh.dir}\n"
    assert fresh.status()["pids"] == pids
    done = fresh.run("up", *SMALL, "--nodes=3", check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "sandbox: up already in another shape (nodes is 2, not 3); run `sandbox down` first\n",
    )


def test_two_sandboxes_live_side_by_side(fresh: Sandbox, other: Sandbox) -> None:
    fresh.run("up", *SMALL)
    other.run("up", *SMALL, "--nodes=1")
    assert fresh.slurm("sinfo", "-h", "-p", "main", "-o", "%D %T").stdout == "2 idle\n"
    assert other.slurm("sinfo", "-h", "-p", "main", "-o", "%D %T").stdout == "1 idle\n"
    fresh.run("down")
    assert other.slurm("srun", "hostname").stdout == "node1\n"


def test_up_returns_although_its_output_is_a_pipe(fresh: Sandbox) -> None:
    # `command` reads until every holder of the pipe has closed it.
    assert fresh.command("sh", "-c", f"{SANDBOX} up --nodes=1 --gpus=0 2>&1 | cat").stdout


def test_job_ids_do_not_repeat_over_fresh_starts(fresh: Sandbox) -> None:
    ids = []
    for _ in range(2):
        fresh.run("up", "--nodes=1", "--gpus=0")
        ids.append(int(fresh.submit("#!/bin/sh\n")))
        fresh.run("down")
        time.sleep(1.1)  # one id per second
    assert ids[1] > ids[0]


def test_everything_says_clearly_that_the_sandbox_is_down(fresh: Sandbox) -> None:
    for verb in (["env"], ["exec", "--", "true"], ["ps"], ["power-off", "node1"]):
        done = fresh.run(*verb, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f"sandbox: no sandbox is up in {fresh.dir}; start one with `sandbox up`\n",
        )
    fresh.run("up", *SMALL)
    fresh.run("down")
    done = fresh.slurm("squeue", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"squeue: the sandbox in {fresh.dir} is down")


def test_up_after_a_crash_starts_afresh(fresh: Sandbox) -> None:
    fresh.run("up", *SMALL)
    pids = fresh.status()["pids"]
    recorded = starts(pids.values())
    os.kill(pids["controller"], signal.SIGKILL)
    wait_until(lambda: not fresh.status()["up"], "the controller to be gone")
    fresh.run("up", *SMALL)
    wait_until(
        lambda: not recorded & starts(pids.values()),
        "all recorded processes to be gone",
    )
    assert fresh.slurm("srun", "-N2", "-l", "hostname").stdout.count("node") == 2


def test_up_that_is_killed_halfway_leaves_nothing_after_down(fresh: Sandbox) -> None:
    argv = [str(SANDBOX), "up", "--nodes=8"]
    with subprocess.Popen(argv, env=fresh.env, stdout=subprocess.DEVNULL) as up:
        wait_until(lambda: (fresh.dir / "sandbox.json").exists(), "the first record")
        up.kill()
    fresh.run("down")
    wait_until(lambda: running(fresh.dir) == [], "all to be gone")


@pytest.mark.parametrize("field", ["boot", "started"])
def test_stale_record_never_hits_a_foreign_process(fresh: Sandbox, field: str) -> None:
    fresh.run("up", *SMALL)
    record = json.loads((fresh.dir / "sandbox.json").read_text())
    fresh.run("down")
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as foreign:
        # As after a reboot, or after pids have come round: the number now belongs to another
        # process.
        stat = Path(f"/proc/{foreign.pid}/stat").read_text().rpartition(")")[2].split()
        for machine in record["machines"].values():
            machine["pid"] = foreign.pid
            machine["started"] = int(stat[19]) - (1 if field == "started" else 0)
        if field == "boot":
            record["boot"] = "00000000-0000-0000-0000-000000000000"
        (fresh.dir / "sandbox.json").write_text(json.dumps(record))
        assert fresh.status()["up"] is False
        fresh.run("down")
        assert foreign.poll() is None
        foreign.kill()


def test_long_directory_is_no_problem(fresh: Sandbox) -> None:
    fresh.env["SANDBOX_DIR"] = str(fresh.dir / "/".join(["a-rather-long-name"] * 10))
    fresh.run("up", *SMALL)
    assert fresh.run("exec", "--", "srun", "hostname").stdout == "node1\n"
    fresh.run("down")


def test_directory_that_slurm_cannot_hold_is_refused(fresh: Sandbox) -> None:
    done = fresh.run("up", "--dir", f"{fresh.dir}/a b", check=False)
    assert done.returncode == 2
    assert "without blanks" in done.stderr


@pytest.mark.slow
def test_accounting_makes_sacct_answer(fresh: Sandbox) -> None:
    fresh.run("up", "--nodes=1", "--accounting")
    job = fresh.submit("#!/bin/sh\nexit 3\n", "--gpus-per-node=h100:1")
    argv = ("-n", "-X", "-P", "-j", job, "-o", "State,ExitCode,AllocTRES")
    wait_until(lambda: "FAILED" in fresh.slurm("sacct", *argv).stdout, "the record of the job")
    state, code, resources = fresh.slurm("sacct", *argv).stdout.strip().split("|")
    assert (state, code) == ("FAILED", "3:0")
    assert "gres/gpu=1" in resources


def test_another_slurm_can_be_laid_over_the_machines_own(fresh: Sandbox) -> None:
    folder = Path(__file__).parents[3] / ".cache/slurm-trixie"
    if not folder.is_dir():
        reason = f"no second Slurm: {SANDBOX} fetch trixie {folder}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    before = subprocess.run(["/usr/bin/squeue", "--version"], capture_output=True).stdout
    assert fresh.run("fetch", "trixie", str(folder)).stdout == f"{folder} is there\n"
    fresh.run("up", *SMALL, "--slurm", str(folder))
    assert fresh.slurm("sinfo", "--version").stdout.startswith("slurm-wlm 24.11")
    job = fresh.submit("#!/bin/sh\nsqueue --version; python3 --version; srun -N2 hostname\n", "-N2")
    fresh.wait_job(job, "COMPLETED")
    output = fresh.output(job)
    assert output.startswith("slurm-wlm 24.11")
    assert sorted(output.split()[-2:]) == ["node1", "node2"]
    # Back after a power cut with the same Slurm; the machine itself keeps its own.
    fresh.run("power-off", "node2")
    fresh.run("power-on", "node2")
    assert "Version=24.11" in fresh.slurm("scontrol", "show", "node", "node2").stdout
    assert subprocess.run(["/usr/bin/squeue", "--version"], capture_output=True).stdout == before


@pytest.mark.parametrize("name", ["nothing", "a:b"])
def test_a_folder_without_another_slurm_is_refused(fresh: Sandbox, name: str) -> None:
    folder = fresh.work / name
    if name != "nothing":
        (folder / "usr").mkdir(parents=True)
    done = fresh.run("up", *SMALL, "--slurm", str(folder), check=False)
    assert done.returncode == 2
    assert str(folder) in done.stderr


def test_sources_of_another_suite_keep_the_mirror_and_leave_out_others() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sandboxlib import versions as v\n"
        "v.codename = lambda: 'old'\n"
        "print(v.other_suite('deb [a=b] http://m/d old main\\ndeb http://m/s old-sec main\\n'\n"
        "                    '# deb http://x old main\\n', 'new', deb822=False), end='')\n"
        "print(v.other_suite('Types: deb\\nURIs: http://m\\nSuites: old old-updates\\n\\n'\n"
        "                    'Types: deb\\nURIs: http://o\\nSuites: stable', 'new', deb822=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SANDBOX.parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "deb [a=b] http://m/d new main\nTypes: deb\nURIs: http://m\nSuites: new\n"
    )


ENDS_MEANWHILE = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from sandboxlib import cli, cluster, state
from sandboxlib.state import CONTROLLER, Process, Record, SandboxError

controller = subprocess.Popen(["sleep", "1000"])

def ends(record):
    if sys.argv[2] == "ends":
        controller.kill()
    raise SandboxError("ip: Cannot open network namespace")

cluster.nodes, cli._ENDS_WITHIN_S = ends, 60 if sys.argv[2] == "ends" else 0
machines = {CONTROLLER: Process.of(controller.pid)}
try:
    print(cli._nodes(Record(boot=state.boot_id(), shape=None, machines=machines)))
except SandboxError as error:
    print(error)
controller.kill()
controller.wait()
"""


@pytest.mark.parametrize(
    ("how", "said"), [("ends", "None"), ("stays", "ip: Cannot open network namespace")]
)
def test_a_cluster_that_ends_while_it_is_looked_at_is_down(how: str, said: str) -> None:
    argv = [sys.executable, "-c", ENDS_MEANWHILE, str(SANDBOX.parent), how]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"
