"""Plans: every decision, from variables and options to a number of nodes that may change."""

from typing import Any

import pytest

from tests.support.planned import EVERYWHERE, FULL, KINDS, job, site
from toolkit.errors import PlanError
from toolkit.job.spec import JobSpec
from toolkit.planning import LaunchPlan, plan
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.local import LocalPlan
from toolkit.planning.slurm import SlurmPlan
from toolkit.profile import KubernetesProfile, LocalProfile, SlurmProfile

# ---- Environment

TOOLKIT_ENV = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONUNBUFFERED": "1",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "60",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
}
POD_ENV = {
    "HOME": "/tmp",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",
}


def own(kind: str, spec: JobSpec) -> dict[str, str]:
    """Return what only this kind of site needs."""
    if kind != "kubernetes":
        return {}
    own = {"TRAIN_RUN_DIR": f"/runs/digits-{spec.digest}", "TRAIN_START": "digits"}
    return POD_ENV | own


def test_a_run_with_a_name_has_a_directory_of_that_name() -> None:
    made = plan(job(), site("kubernetes"), run_name="digits-x")
    assert made.env["TRAIN_RUN_DIR"] == "/runs/digits-x"


@EVERYWHERE
def test_the_environment_is_no_more_than_what_is_needed(kind: str) -> None:
    assert plan(job(), site(kind)).env == TOOLKIT_ENV | own(kind, job())


@EVERYWHERE
def test_the_profile_wins_over_the_toolkit_and_the_job_over_both(kind: str) -> None:
    spec = job(resources={"cpus_per_node": 4}, env={"B": "job", "C": "job", "OMP_NUM_THREADS": "j"})
    profile = site(
        kind,
        network_interface="ib0",
        env={
            "A": "site",
            "B": "site",
            "OMP_NUM_THREADS": "s",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        },
    )
    assert plan(spec, profile).env == TOOLKIT_ENV | own(kind, spec) | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "j",
        "A": "site",
        "B": "job",
        "C": "job",
    }


@EVERYWHERE
def test_a_secret_of_the_job_wins_over_a_value_of_the_site(kind: str) -> None:
    """Written down twice, the plain value would come last and hide the secret."""
    spec = job(secrets=["LOGIN", "HOME"])
    profile = site(kind, env={"LOGIN": "plain", "B": "site"})
    if isinstance(profile, KubernetesProfile):
        profile = profile.model_copy(update={"secret": "keys"})
    made = plan(spec, profile)
    assert set(made.secrets) == {"LOGIN", "HOME"}
    assert set(made.env) & set(made.secrets) == set()
    assert made.env["B"] == "site"


@pytest.mark.parametrize(
    ("cpus", "workers", "threads"),
    [(None, 1, None), (None, 8, "1"), (1, 1, "1"), (96, 8, "12"), (95, 8, "11"), (4, 8, "1")],
)
@EVERYWHERE
def test_workers_share_the_cpus_of_their_node(
    kind: str, cpus: int | None, workers: int, threads: str | None
) -> None:
    need = {"nproc_per_node": workers, "cpus_per_node": cpus}
    assert plan(job(resources=need), site(kind)).env.get("OMP_NUM_THREADS") == threads


# ---- torchrun, stop, retries


@EVERYWHERE
def test_torchrun_is_told_all_that_the_site_does_not_tell_it(kind: str) -> None:
    made = plan(FULL, site(kind, **({"secret": "keys"} if kind == "kubernetes" else {})))
    options: tuple[str, ...] = ("--nnodes=2", "--nproc-per-node=4", "--max-restarts=3")
    options += ("--rdzv-backend=c10d",)
    if kind == "kubernetes":
        options += ("--rdzv-endpoint=digits-worker-0:23456", "--rdzv-id=digits", "--tee=3")
    assert made.torchrun == options
    assert made.entry == ("-m", "train", "--lr", "1e-3")
    assert made.env["PET_SHUTDOWN_TIMEOUT"] == "60"


def test_one_number_decides_how_a_run_is_stopped() -> None:
    spec = job(stop={"grace": "5m"})
    for kind in KINDS:
        made: LaunchPlan = plan(spec, site(kind))
        assert made.env["PET_SHUTDOWN_TIMEOUT"] == "300"
        assert made.stop_timeout_s == 330
    slurm, pod = plan(spec, SlurmProfile()), plan(spec, KubernetesProfile())
    assert dict(slurm.sbatch)["signal"] == "B:USR1@330"
    assert pod.pod.grace_s == 315


def test_a_checkpoint_longer_than_kill_wait_is_noted() -> None:
    def notes(grace: str, kill_wait: str) -> tuple[str, ...]:
        return plan(job(stop={"grace": grace}), site("slurm", kill_wait=kill_wait)).notes

    assert notes("60s", "60s") == ()
    assert notes("61s", "1m") == (
        "scancel by hand, and preemption without GraceTime, leave 1m (KillWait of profile 'a100'), "
        "less than stop.grace 1m1s; a checkpoint that takes longer is lost then",
    )


def test_sbatch_gets_every_option_in_order() -> None:
    made = plan(
        job(
            resources={
                "nnodes": 4,
                "nproc_per_node": 8,
                "gpus_per_node": 8,
                "cpus_per_node": 96,
                "memory": "1500MB",
            },
            time_limit="25h",
            retries={"requeue": 1},
        ),
        site("slurm", partition="gpu", account="me", qos="high", gpu_type="h100"),
    )
    assert isinstance(made, SlurmPlan)
    assert made.sbatch == (
        ("job-name", "digits"),
        ("nodes", "4"),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", "96"),
        ("mem", "1431M"),
        ("gpus-per-node", "h100:8"),
        ("time", "1-01:00:00"),
        ("partition", "gpu"),
        ("account", "me"),
        ("qos", "high"),
        ("signal", "B:USR1@90"),
        ("requeue", None),
        ("open-mode", "append"),
        ("output", "digits-%j.out"),
    )


def test_sbatch_gets_no_option_that_nobody_asked_for() -> None:
    made = plan(job(), site("slurm"))
    assert isinstance(made, SlurmPlan)
    assert made.sbatch == (
        ("job-name", "digits"),
        ("nodes", "1"),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", "1"),
        ("signal", "B:USR1@90"),
        ("no-requeue", None),
        ("open-mode", "append"),
        ("output", "digits-%j.out"),
    )


def test_pods_get_what_was_asked_and_are_restarted_as_often_as_asked() -> None:
    made = plan(
        job(
            resources={
                "nnodes": 3,
                "nproc_per_node": 2,
                "gpus_per_node": 2,
                "memory": "64GiB",
                "shm": "500MB",
            },
            retries={"in_job": 1, "requeue": 2},
        ),
        site("kubernetes", gpu_resource="amd.com/gpu", resources={"rdma/hca": 1}),
    )
    assert isinstance(made, KubernetesPlan)
    requests = {"cpu": "2", "memory": "64Gi", "amd.com/gpu": "2", "rdma/hca": "1"}
    assert made.pod.requests == requests
    assert made.pod.volumes[1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "500M"}
    assert (made.pod.grace_s, made.image) == (75, "localhost/train:latest")
    assert (made.restart_policy, made.backoff_limit) == ("OnFailure", 7)
    assert {"--nnodes=3", "--nproc-per-node=2", "--max-restarts=1"} <= {*made.torchrun}
    assert made.entry == ("-m", "train")
    assert [note.partition(":")[0] for note in made.notes] == [
        "profile 'a100' names no runs_claim",
        "without runs_claim, pods do not count failures",
    ]
    plain = plan(job(), site("kubernetes", runs_claim="runs"))
    assert isinstance(plain, KubernetesPlan)
    assert (plain.restart_policy, plain.backoff_limit) == ("Never", None)
    assert (plain.pod.requests, plain.notes) == ({"cpu": "1"}, ())


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"host_network": True}, "host_network: pods see and use every port of their node"),
        ({"capabilities": ["IPC_LOCK"], "run_as_user": 0}, "capabilities IPC_LOCK are added"),
        ({"run_as_user": 0}, "run_as_user 0: the container runs as root"),
        ({"read_only_root": False}, "read_only_root is off: the image's files can be changed"),
    ],
)
def test_what_loosens_the_security_of_pods_is_noted(facts: dict[str, Any], note: str) -> None:
    profile = site("kubernetes", runs_claim="runs", pod_security="privileged", **facts)
    noted = plan(job(), profile).notes
    assert noted[0] == f"profile 'a100' loosens the pods' security: {note}"
    assert len(noted) == len(facts)


def test_shared_memory_without_a_limit_of_memory_is_noted() -> None:
    profile = site("kubernetes", runs_claim="runs")
    (note,) = plan(job(resources={"shm": "1GiB"}), profile).notes
    assert note.startswith("resources.shm without memory")
    assert plan(job(resources={"shm": "1GiB", "memory": "2GiB"}), profile).notes == ()


@pytest.mark.parametrize(
    ("nnodes", "gpus", "devices"),
    [(1, 0, ((),)), (2, 0, ((), ())), (2, 1, ((0,), (1,))), (3, 2, ((0, 1), (2, 3), (4, 5)))],
)
def test_simulated_nodes_share_no_gpu(
    nnodes: int, gpus: int, devices: tuple[tuple[int, ...], ...]
) -> None:
    made = plan(job(resources={"nnodes": nnodes, "gpus_per_node": gpus}), site("local"))
    assert isinstance(made, LocalPlan) and made.visible_devices == devices


# ---- A number of nodes that may change

RANGE = {"nnodes": {"min": 2, "max": 4}}


def test_a_range_of_nodes_is_left_to_torchrun_and_to_the_scheduler() -> None:
    spec = job(resources=RANGE, retries={"in_job": 3})
    for kind in ("local", "slurm"):
        assert "--nnodes=2:4" in plan(spec, site(kind)).torchrun
    options = dict(plan(spec, SlurmProfile(name="s")).sbatch)
    assert options["nodes"] == "2-4"
    assert "no-kill" in options
    # Slurm 22.05 gives the fewest nodes of a range where --ntasks-per-node is given.
    assert "ntasks-per-node" not in options
    assert len(plan(spec, LocalProfile(name="l")).visible_devices) == 4


def test_the_same_few_and_many_are_a_plain_number() -> None:
    spec = job(resources={"nnodes": {"min": 3, "max": 3}})
    assert plan(spec, site("slurm")).torchrun[0] == "--nnodes=3"
    assert dict(plan(spec, SlurmProfile(name="s")).sbatch)["nodes"] == "3"


@pytest.mark.parametrize(
    ("keys", "profile", "reason"),
    [
        ({}, {}, "nnodes with min and max needs retries.in_job: without it, the run ends with the "
         "first node that is lost"),
        ({"retries": {"in_job": 1}}, {"gpus_flag": "gpus-per-task"},
         "nnodes with min and max does not work with gpus-per-task, since Slurm chooses the "
         "number of tasks; write gpus_flag: gres"),
    ],
)  # fmt: skip
def test_what_a_range_of_nodes_needs(
    keys: dict[str, Any], profile: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(job(resources=RANGE, **keys), SlurmProfile(name="s", **profile))
    assert str(caught.value) == reason
