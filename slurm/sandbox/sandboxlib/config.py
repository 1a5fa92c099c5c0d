"""The files that Slurm, munge and the shims need. Pure text, except for `write_all`."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import time

from .packages import PATH
from .state import CONTROLLER, Process, SandboxError, Shape, StateDir

RUN = "/run/slurm-sandbox"
"""Where each namespace mounts its own small file system, for sockets and pid files."""

COMMANDS = (
    "sbatch",
    "squeue",
    "scontrol",
    "scancel",
    "sinfo",
    "sacct",
    "sacctmgr",
    "srun",
    "salloc",
    "sattach",
    "sdiag",
    "sprio",
    "sstat",
)


def address(name: str) -> str:
    """Return the address of a machine, within TEST-NET-2 (RFC 5737), which no real host has."""
    host = 254 if name == CONTROLLER else int(name.removeprefix("node"))
    return f"198.51.100.{host}"


def first_job_id(now_s: float) -> int:
    """One id per second, so that fresh clusters do not repeat the ids of earlier ones.

    Stays below MaxJobId (67,043,328) and comes round after almost two years.
    """
    return int(now_s) % 60_000_000 + 1


def hosts(shape: Shape) -> str:
    """Text of /etc/hosts on every machine."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address(name)} {name}" for name in (CONTROLLER, *shape.node_names)]
    return "\n".join(lines) + "\n"


def slurm_conf(shape: Shape, state: StateDir, job_id: int) -> str:
    """Text of slurm.conf: a site with short delays, no enforcement and preemption by partition."""
    nodes = f"node[1-{shape.nodes}]"
    gres = f" Gres=gpu:h100:{shape.gpus}" if shape.gpus else ""
    kind = f"Sockets=1 CoresPerSocket={shape.cpus} ThreadsPerCore=1 RealMemory={shape.memory}{gres}"
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={CONTROLLER}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired, 120 s by default.
        f"AuthInfo=socket={RUN}/munge.sock,cred_expire=5",
        f"StateSaveLocation={state.path}/state",
        f"SlurmdSpoolDir={RUN}/spool",
        f"SlurmctldPidFile={RUN}/slurmctld.pid",
        f"SlurmdPidFile={RUN}/slurmd.pid",
        f"SlurmctldLogFile={state.logs}/slurmctld.log",
        f"SlurmdLogFile={state.logs}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        "MailProg=/bin/true",
        "MpiDefault=none",
        # The plugins that work with cgroup v1, v2 and none.
        # linuxproc looks for a step's processes 1, 3, 7, 15, 31 and 63 s after its end. With the
        # default of 60 s, one that is still there at 31 s would drain the node.
        "ProctrackType=proctrack/linuxproc",
        "UnkillableStepTimeout=180",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
        *(["JobAcctGatherParams=OverMemoryKill"] if shape.over_memory_kill else []),
        # Without CAP_SYS_RESOURCE limits cannot be raised, and jobs would fail to start. Only
        # the limit of core files comes from the submitter: slurmd itself sets none.
        "PropagateResourceLimits=CORE",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # Slurm believes the CPUs, memory and GPUs of this file and not the machine's own.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SlurmdTimeout=10",
        # Half the default: a cut cable is noticed after 15 s instead of 30.
        f"MessageTimeout={shape.message_timeout}",
        f"KillWait={shape.kill_wait}",
        f"MinJobAge={shape.min_job_age}",
        "JobRequeue=1",
        f"FirstJobId={job_id}",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=2,batch_sched_delay=1,sched_interval=5,sched_min_interval=0",
        f"DefMemPerCPU={shape.memory // shape.cpus}",
        *(["GresTypes=gpu"] if shape.gpus else []),
        f"NodeName={nodes} {kind} State=UNKNOWN",
        # `high` takes nodes from `low`; `main` neither takes nor gives.
        f"PartitionName=main Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=OFF State=UP",
        f"PartitionName=low Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE State=UP",
        f"PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF State=UP",
    ]
    if shape.cloud:
        lines += [
            f"NodeName=cloud[1-{shape.cloud}] {kind} State=CLOUD",
            f"PartitionName=cloud Nodes=cloud[1-{shape.cloud}] State=UP",
            # Slurm takes cloud nodes only where it knows how they are started.
            "ResumeProgram=/bin/false",
            "SuspendProgram=/bin/true",
            "SuspendTime=3600",
            f"SuspendExcNodes={nodes}",
        ]
    if shape.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={CONTROLLER}",
            f"AccountingStoragePass={RUN}/munge.sock",
            *(["AccountingStorageTRES=gres/gpu"] if shape.gpus else []),
        ]
    return "\n".join(lines) + "\n"


def gres_conf(shape: Shape, state: StateDir) -> str:
    """Text of gres.conf: device files that look like GPUs to Slurm."""
    if not shape.gpus:
        return ""
    files = f"{state.dev}/gpu" + (f"[0-{shape.gpus - 1}]" if shape.gpus > 1 else "0")
    return f"AutoDetect=off\nName=gpu Type=h100 File={files}\n"


def slurmdbd_conf(state: StateDir) -> str:
    """Text of slurmdbd.conf: a database that only the controller's namespace can reach."""
    lines = [
        f"DbdHost={CONTROLLER}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={RUN}/munge.sock",
        f"PidFile={RUN}/slurmdbd.pid",
        f"LogFile={state.logs}/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        "StoragePort=3306",
        "StorageUser=root",
        "StorageLoc=slurm",
    ]
    return "\n".join(lines) + "\n"


SHIM = """\
#!/bin/sh
# {command} as on the login node of the sandbox in {dir}.
export SLURM_CONF={conf}
# Within a job the node is the right place already.
[ -e {run}/node ] && exec {real} "$@"
line=
[ -r /proc/{pid}/stat ] && read -r line 2>/dev/null </proc/{pid}/stat
# Fields 3 (state: a dead process may still be listed) and 22 (start time: a pid may be used again).
state= started= i=3
for field in ${{line##*) }}; do
    case $i in
    3) state=$field ;;
    22) started=$field && break ;;
    esac
    i=$((i + 1))
done
if [ "$state" = Z ] || [ "$state" = X ] || [ "$started" != {started} ]; then
    echo "{command}: the sandbox in {dir} is down; start it with: {sandbox} up" >&2
    exit 1
fi
exec nsenter --target {pid} --net --mount --uts --wdns="$PWD" -- {real} "$@"
"""


def shim(command: str, state: StateDir, controller: Process, sandbox: str) -> str:
    """Text of a script that runs a real Slurm command within the controller's namespaces."""
    real = shutil.which(command, path=PATH)
    return SHIM.format(
        command=command,
        real=shlex.quote(real or f"/usr/bin/{command}"),
        dir=state.path,
        conf=shlex.quote(str(state.slurm_conf)),
        run=RUN,
        pid=controller.pid,
        started=controller.started,
        sandbox=sandbox,
    )


def write_shims(state: StateDir, controller: Process, sandbox: str) -> None:
    """Write one shim per Slurm command."""
    for command in COMMANDS:
        path = state.bin / command
        path.write_text(shim(command, state, controller, sandbox))
        path.chmod(0o755)


def write_all(shape: Shape, state: StateDir) -> None:
    """Write the configuration, the key and the device files."""
    (state.etc / "hosts").write_text(hosts(shape))
    state.slurm_conf.write_text(slurm_conf(shape, state, first_job_id(time.time())))
    (state.etc / "gres.conf").write_text(gres_conf(shape, state))
    key = state.etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    if shape.accounting:
        conf = state.etc / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(slurmdbd_conf(state))
    for index in range(shape.gpus):
        try:
            os.mknod(state.dev / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError as error:
            raise SandboxError(
                f"cannot make device files in {state.dev} ({error.strerror}); use --gpus 0"
            ) from error
