"""What jobs find in the sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import SANDBOX, Sandbox, wait_until

pytestmark = pytest.mark.slurm


def test_job_on_two_nodes_runs_on_both(sandbox: Sandbox) -> None:
    job = sandbox.submit("#!/bin/bash\nsrun hostname | sort\n", "-N2", "--ntasks-per-node=1")
    assert sandbox.wait_job(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    hosts = sandbox.output(job).split()
    assert len(set(hosts)) == 2
    assert set(hosts) < {"node1", "node2", "node3"}


def test_nodes_reach_each_other_by_name(sandbox: Sandbox) -> None:
    script = "for n in node1 node2 node3; do getent hosts $n; done"
    done = sandbox.slurm("srun", "-N3", "--ntasks-per-node=1", "sh", "-c", script)
    names = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert sorted(names) == sorted([f"198.51.100.{i} node{i}" for i in (1, 2, 3)] * 3)
    script = "exec 3<>/dev/tcp/node3/6818"
    sandbox.slurm("srun", "-w", "node1,node2", "--ntasks-per-node=1", "bash", "-c", script)


def test_a_crash_leaves_a_core_only_where_who_submits_wants_one(sandbox: Sandbox) -> None:
    there = f"{sandbox.dir}/bin/srun -N1 bash -c 'ulimit -c'"
    done = sandbox.command("bash", "-c", f"ulimit -S -c 0; {there}; ulimit -S -c 1; {there}")
    assert done.stdout == "0\n1\n"


def test_fake_gpus_are_allocated_and_run_out(sandbox: Sandbox) -> None:
    script = "#!/bin/bash\necho $CUDA_VISIBLE_DEVICES\nsleep 60\n"
    first = sandbox.submit(script, "-w", "node1", "--gpus-per-node=h100:3", "--mem=1G")
    wait_until(lambda: "\n" in sandbox.output(first), "the first job to start")
    assert sandbox.output(first) == "0,1,2\n"
    second = sandbox.submit(script, "-w", "node1", "--gpus-per-node=h100:2", "--mem=1G")
    wait_until(lambda: sandbox.job(second)["Reason"] == "Resources", "the second job to wait")
    sandbox.slurm("scancel", first)
    wait_until(lambda: "\n" in sandbox.output(second), "the second job to start")
    sandbox.slurm("scancel", second)
    sandbox.wait_job(second, "CANCELLED")


def test_partition_high_preempts_low_but_not_main(sandbox: Sandbox) -> None:
    script = "#!/bin/bash\necho run $SLURM_RESTART_COUNT\nsleep 60\n"
    alone = ("--exclusive", "--open-mode=append")
    main = sandbox.submit(script, "-w", "node1", *alone)
    low = sandbox.submit(script, "-p", "low", "-w", "node2", *alone)
    for job in (main, low):
        sandbox.wait_job(job, "RUNNING")
    high = sandbox.submit("#!/bin/bash\nhostname\n", "-p", "high", "-w", "node2", *alone)
    sandbox.wait_job(high, "COMPLETED")
    wait_until(lambda: "run 1\n" in sandbox.output(low), "the second run")
    assert sandbox.job(main)["Restarts"] == "0"
    sandbox.slurm("scancel", main, low)
    for job in (main, low):
        sandbox.wait_job(job, "CANCELLED")


def test_cancelled_job_leaves_no_process(sandbox: Sandbox) -> None:
    job = sandbox.submit("#!/bin/bash\nsrun sleep 1000\n", "-N2", "--ntasks-per-node=2", "--mem=1G")
    wait_until(
        lambda: sum(e["command"].endswith("/sleep 1000") for e in sandbox.jobs_processes()) == 4,
        "four tasks",
    )
    assert {e["node"] for e in sandbox.jobs_processes()} == set(
        sandbox.slurm("scontrol", "show", "hostnames", sandbox.job(job)["NodeList"]).stdout.split()
    )
    sandbox.slurm("scancel", job)
    wait_until(lambda: sandbox.jobs_processes() == [], "all processes to be gone")


def test_shims_pass_stdin_status_cwd_and_environment(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.env["SANDBOX_TEST_WORD"] = "a b"
    script = 'read -r line; echo "$line|$PWD|$SANDBOX_TEST_WORD"; exit 7'
    done = sandbox.slurm("srun", "sh", "-c", script, stdin="hello\n", cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (7, f"hello|{tmp_path}|a b\n")


def test_shims_work_within_a_job(sandbox: Sandbox) -> None:
    path = f"{sandbox.dir}/bin:{os.environ['PATH']}"
    script = f"#!/bin/bash\nexport PATH={path}\nsrun hostname\nsqueue -h -j $SLURM_JOB_ID -o %T\n"
    job = sandbox.submit(script, "-w", "node3")
    sandbox.wait_job(job, "COMPLETED", "FAILED")
    assert sandbox.output(job) == "node3\nRUNNING\n"


def test_jobs_find_slurm_without_the_callers_environment(sandbox: Sandbox) -> None:
    script = "#!/bin/bash\nunset SLURM_CONF\n/usr/bin/squeue -h -j $SLURM_JOB_ID -o %T\n"
    job = sandbox.submit(script, "--export=NONE")
    sandbox.wait_job(job, "COMPLETED", "FAILED")
    assert sandbox.output(job) == "RUNNING\n"


def test_env_makes_any_shell_a_login_node(sandbox: Sandbox) -> None:
    script = 'eval "$("$0" env)"; eval "$("$0" env)"; sinfo -h -p main -o "%D %T"; echo "$PATH"'
    nodes, path = sandbox.command("sh", "-c", script, str(SANDBOX)).stdout.splitlines()
    assert nodes == "3 idle"
    assert path.split(":").count(f"{sandbox.dir}/bin") == 1


def test_exec_is_on_the_login_node(sandbox: Sandbox) -> None:
    done = sandbox.run("exec", "--", "sh", "-c", "hostname; pwd; exit 5", check=False)
    assert (done.returncode, done.stdout) == (5, f"controller\n{sandbox.work}\n")
