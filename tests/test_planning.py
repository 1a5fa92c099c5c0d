"""Plans: every decision, and every reason why a job cannot work somewhere."""

import builtins
import datetime
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from toolkit.errors import PlanError
from toolkit.planning import KubernetesPlan, LaunchPlan, LocalPlan, SlurmPlan, plan
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile
from toolkit.rendering import render
from toolkit.spec import JobSpec, Secret

KINDS: dict[str, Callable[..., Profile]] = {
    "local": LocalProfile,
    "slurm": SlurmProfile,
    "kubernetes": KubernetesProfile,
}
JOB: dict[str, Any] = {"name": "digits", "module": "train", "image": "localhost/train:latest"}
EVERYWHERE = pytest.mark.parametrize("kind", KINDS)


def job(**keys: Any) -> JobSpec:
    return JobSpec.model_validate(JOB | keys)


def site(kind: str, **keys: Any) -> Profile:
    return KINDS[kind](**{"name": "a100", **keys})


def refusal(spec: JobSpec, profile: Profile, run_name: str | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        plan(spec, profile, run_name=run_name)
    return str(caught.value)


# ---- Pure

FULL = job(
    args=["--lr", "1e-3"],
    resources={"nnodes": 2, "nproc_per_node": 4, "gpus_per_node": 4, "cpus_per_node": 30},
    time_limit="1h",
    env={"A": "b"},
    secrets=["TOKEN"],
    retries={"in_job": 3, "requeue": 2},
)


IMPURE = {
    "_datetime",
    "_io",
    "_random",
    "_socket",
    "datetime",
    "io",
    "os",
    "posix",
    "random",
    "time",
}


def impure_calls(work: Callable[[], object]) -> set[str]:
    """Return what `work` asks of the clock, the environment, files, or chance."""
    found = set()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            home = getattr(arg, "__module__", None) or type(arg.__self__).__module__
            if isinstance(arg.__self__, type):
                home = arg.__self__.__module__
            if home in IMPURE or arg in (builtins.open, builtins.compile):
                found.add(arg.__qualname__)
        elif event == "call" and frame.f_globals.get("__name__") in IMPURE:
            found.add(frame.f_code.co_qualname)

    gc.disable()  # hypothesis times every collection, whoever's work sets it off
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize(
    "touch",
    [
        lambda: os.environ.get("HOME"),
        Path.cwd,
        lambda: Path("/").is_dir(),
        lambda: Path("/dev/null").open().close(),
        time.time,
        datetime.datetime.now,
        datetime.date.today,
        random.random,
        lambda: compile("1", "", "eval"),
    ],
)
def test_the_test_of_purity_sees_what_is_impure(touch: Callable[[], object]) -> None:
    assert impure_calls(touch) != set()


@EVERYWHERE
def test_a_plan_is_a_function_of_job_and_site_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = site(kind, **({"secret": "keys"} if kind == "kubernetes" else {}))
    made = plan(FULL, profile)
    text = render(made)  # reads its template, once
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.chdir("/")
    assert (plan(FULL, profile), render(plan(FULL, profile))) == (made, text)
    assert impure_calls(lambda: plan(FULL, profile)) == set()
    assert impure_calls(lambda: render(made)) == set()


# ---- What does not fit


@EVERYWHERE
@pytest.mark.parametrize(
    ("need", "message"),
    [
        (
            {"nproc_per_node": 9, "gpus_per_node": 8},
            "nproc_per_node 9 exceeds the 8 GPUs per node of profile 'a100'",
        ),
        (
            {"nproc_per_node": 9, "gpus_per_node": 9},
            "gpus_per_node 9 exceeds the 8 GPUs per node of profile 'a100'",
        ),
        (
            {"nproc_per_node": 4, "gpus_per_node": 2},
            "nproc_per_node 4 exceeds gpus_per_node 2; each worker needs a GPU of its own",
        ),
        ({"cpus_per_node": 97}, "cpus_per_node 97 exceeds the 96 CPUs per node of profile 'a100'"),
        ({"nproc_per_node": 97}, "cpus_per_node 97 exceeds the 96 CPUs per node of profile 'a100'"),
        ({"memory": "901GiB"}, "memory 901GiB exceeds the 900GiB per node of profile 'a100'"),
        (
            {"memory": "64GiB", "shm": "65536MiB"},
            "shm 64GiB leaves nothing of memory 64GiB, which it is part of",
        ),
    ],
)
def test_what_a_node_does_not_have_is_refused_with_the_arithmetic(
    kind: str, need: dict[str, Any], message: str
) -> None:
    profile = site(kind, node={"gpus": 8, "cpus": 96, "memory": "900GiB"})
    assert refusal(job(resources=need), profile) == message


@EVERYWHERE
def test_what_a_node_just_has_is_granted(kind: str) -> None:
    need = {
        "nproc_per_node": 8,
        "gpus_per_node": 8,
        "cpus_per_node": 96,
        "memory": "900GiB",
        "shm": "899GiB",
    }
    made = plan(job(resources=need), site(kind, node={"gpus": 8, "cpus": 96, "memory": "900GiB"}))
    assert made.job.resources.nproc_per_node == 8


@EVERYWHERE
def test_workers_without_gpus_are_not_counted_against_them(kind: str) -> None:
    """Several workers on CPUs run on any node, also on one with GPUs or with none."""
    for gpus in (0, 8, None):
        plan(job(resources={"nproc_per_node": 16}), site(kind, node={"gpus": gpus}))
    assert refusal(job(resources={"gpus_per_node": 1}), site(kind, node={"gpus": 0})) == (
        "gpus_per_node 1 exceeds the 0 GPUs per node of profile 'a100'"
    )


@EVERYWHERE
def test_a_site_without_facts_refuses_nothing_by_size(kind: str) -> None:
    need = {"gpus_per_node": 64, "nproc_per_node": 64, "cpus_per_node": 4096, "memory": "99TiB"}
    assert plan(job(resources=need), site(kind)).job.resources.gpus_per_node == 64


@pytest.mark.parametrize(
    ("kind", "needed_s", "message"),
    [
        (
            "local",
            60,
            "stop.grace 1m does not fit: stop.grace alone takes 1m, and time_limit is 1m",
        ),
        (
            "slurm",
            60 + 30 + 60,
            "stop.grace 1m does not fit: stop.grace, 30s to requeue and up to 60s that Slurm warns "
            "early takes 2m30s, and time_limit is 2m30s",
        ),
        (
            "kubernetes",
            60 + 15,
            "stop.grace 1m does not fit: stop.grace and 15s for torchrun to end takes 1m15s, "
            "and time_limit is 1m15s",
        ),
    ],
)
def test_stopping_must_take_less_than_the_time_limit(
    kind: str, needed_s: int, message: str
) -> None:
    assert refusal(job(time_limit=f"{needed_s}s"), site(kind)) == message
    fits = plan(job(time_limit=f"{needed_s + 1}s"), site(kind))
    assert fits.job.time_limit_s == needed_s + 1


def test_slurm_warns_no_earlier_than_it_can_count() -> None:
    """sbatch takes at most 65535 seconds for `--signal`."""
    assert refusal(job(stop={"grace": "65506s"}), site("slurm")) == (
        "stop.grace 18h11m46s is too long: Slurm warns at most 65535s ahead, and 30s of them go "
        "to the requeue"
    )
    made = plan(job(stop={"grace": "65505s"}), site("slurm"))
    assert isinstance(made, SlurmPlan) and ("signal", "B:USR1@65535") in made.sbatch


# ---- Mounts, images, secrets, names


def mount(source: str, target: str) -> dict[str, Any]:
    return {"source": source, "target": target}


@pytest.mark.parametrize(
    ("kind", "facts", "mounts", "message"),
    [
        (
            "local",
            {},
            [mount("/data", "/data"), mount("claim:d", "/d")],
            "mounts[1]: 'claim:d' exists only on Kubernetes; write a path",
        ),
        (
            "slurm",
            {},
            [mount("/data", "/mnt")],
            "mounts[0]: profile 'a100' runs without containers, so '/data' cannot appear at "
            "'/mnt'; make source and target equal",
        ),
        (
            "kubernetes",
            {},
            [mount("/data", "/data")],
            "mounts[0]: Pod Security 'restricted' of profile 'a100' allows no folder of the node "
            "('/data'); write claim:NAME",
        ),
        (
            "kubernetes",
            {"pod_security": "baseline"},
            [mount("/data", "/data")],
            "mounts[0]: Pod Security 'baseline' of profile 'a100' allows no folder of the node "
            "('/data'); write claim:NAME",
        ),
        (
            "kubernetes",
            {},
            [mount("claim:a", "/a"), mount("claim:b", "/a")],
            "two mounts have the target '/a'",
        ),
        (
            "kubernetes",
            {"runs_dir": "/shared/runs"},
            [mount("claim:a", "/shared/runs")],
            "mounts[0]: '/shared/runs' is taken; every pod has its own "
            "/tmp, /dev/shm, /shared/runs",
        ),
        (
            "kubernetes",
            {},
            [mount("claim:a", "/dev/shm")],
            "mounts[0]: '/dev/shm' is taken; every pod has its own /tmp, /dev/shm, /runs",
        ),
        (
            "kubernetes",
            {},
            [mount("claim:a", "/")],
            "mounts[0]: a mount at '/' would hide the container's own; choose another target, "
            "like /data",
        ),
        (
            "kubernetes",
            {"runs_dir": "/dev/"},
            [],
            "runs_dir '/dev/' of profile 'a100' would hide the container's own; write a folder "
            "of its own, like /runs",
        ),
    ],
)
def test_mounts_that_a_place_does_not_have_are_refused(
    kind: str, facts: dict[str, Any], mounts: list[dict[str, Any]], message: str
) -> None:
    assert refusal(job(mounts=mounts), site(kind, **facts)) == message


@pytest.mark.parametrize(
    ("kind", "facts", "source", "target"),
    [
        ("local", {}, "/data", "/data"),
        ("slurm", {}, "/data", "/data"),
        ("kubernetes", {}, "claim:data", "/data"),
        ("kubernetes", {"pod_security": "privileged"}, "/data", "/elsewhere"),
    ],
)
def test_mounts_that_a_place_has_are_granted(
    kind: str, facts: dict[str, Any], source: str, target: str
) -> None:
    assert plan(job(mounts=[mount(source, target)]), site(kind, **facts)).job.mounts


def test_kubernetes_needs_an_image_and_the_others_do_not() -> None:
    bare = job(image=None)
    assert refusal(bare, site("kubernetes")) == (
        "profile 'a100' runs containers; the job needs the key 'image'"
    )
    assert plan(bare, site("slurm")).job.image is None
    assert plan(bare, site("local")).job.image is None


@pytest.mark.parametrize("image", ["https://reg.io/x:1", "-v", "UPPER/Case:1", "x@sha256:abc"])
def test_what_is_no_name_of_an_image_is_refused_where_nodes_pull_it(image: str) -> None:
    assert refusal(job(image=image), site("kubernetes")) == (
        f"image {image!r} is no name of an image, as nodes of profile 'a100' pull it; write it "
        "like registry.example.com/team/train:1.2"
    )


def test_kubernetes_needs_to_know_where_secrets_are() -> None:
    spec = job(secrets={"A": None, "B": {"secret": "s", "key": "k"}, "C": None})
    assert refusal(spec, site("kubernetes")).splitlines() == [
        f"secrets: where is {name}? Write {{{name}: {{secret: …, key: …}}}} in the job, or the key "
        "'secret' in profile 'a100'"
        for name in "AC"
    ]
    assert plan(spec, site("kubernetes", secret="keys")).secrets == {
        "A": Secret(secret="keys", key="A"),
        "B": Secret(secret="s", key="k"),
        "C": Secret(secret="keys", key="C"),
    }
    assert plan(spec, site("slurm")).secrets == spec.secrets


def test_pod_names_fit_into_63_characters() -> None:
    spec = job(resources={"nnodes": 1001})
    run_name = "x" * (63 - len("-worker-1000"))
    made = plan(spec, site("kubernetes"), run_name=run_name)
    assert isinstance(made, KubernetesPlan) and made.run_name == run_name
    pod = f"x{run_name}-worker-1000"
    assert refusal(spec, site("kubernetes"), run_name=f"x{run_name}") == (
        f"the pod name '{pod}' has 64 characters, more than 63; shorten 'name'"
    )


def test_the_last_point_of_a_sweep_has_the_longest_name() -> None:
    spec = job(sweep={"grid": {"env.I": list(range(144))}})
    run_name = "x" * (63 - len("-worker-0"))
    assert refusal(spec, site("kubernetes"), run_name=run_name).splitlines() == [
        f"the pod name '{run_name}-143-worker-0' has 67 characters, more than 63; shorten 'name'"
    ]


def test_all_reasons_come_at_once() -> None:
    spec = job(
        image=None,
        resources={"nproc_per_node": 9, "gpus_per_node": 8, "memory": "1TiB"},
        time_limit="10s",
        mounts=[mount("/a", "/a"), mount("claim:b", "/a")],
        secrets=["S"],
    )
    assert refusal(spec, site("kubernetes", node={"gpus": 8, "memory": "900GiB"})).splitlines() == [
        "nproc_per_node 9 exceeds the 8 GPUs per node of profile 'a100'",
        "memory 1TiB exceeds the 900GiB per node of profile 'a100'",
        "two mounts have the target '/a'",
        "stop.grace 1m does not fit: stop.grace and 15s for torchrun to end takes 1m15s, "
        "and time_limit is 10s",
        "profile 'a100' runs containers; the job needs the key 'image'",
        "secrets: where is S? Write {S: {secret: …, key: …}} in the job, or the key 'secret' in "
        "profile 'a100'",
        "mounts[0]: Pod Security 'restricted' of profile 'a100' allows no folder of the node "
        "('/a'); write claim:NAME",
    ]


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
    options = ("--nnodes=2", "--nproc-per-node=4", "--max-restarts=3", "--rdzv-backend=c10d")
    of_operator = ("--nproc-per-node=4", "--tee=3")  # an option would win over its variables
    assert made.torchrun == (of_operator if kind == "kubernetes" else options)
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
        "scancel by hand and preemption leave 1m (KillWait of profile 'a100'), less than "
        "stop.grace 1m1s; a checkpoint that takes longer is lost then",
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
    assert made.pod.volumes[1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "500000000"}
    assert (made.pod.grace_s, made.image) == (75, "localhost/train:latest")
    assert (made.restart_policy, made.backoff_limit) == ("OnFailure", 7)
    assert (made.torchrun, made.entry) == (("--nproc-per-node=2", "--tee=3"), ("-m", "train"))
    assert [note.partition(":")[0] for note in made.notes] == [
        "profile 'a100' names no runs_claim",
        "without runs_claim nobody can count failures or tell those that may pass",
    ]
    plain = plan(job(), site("kubernetes", runs_claim="runs"))
    assert isinstance(plain, KubernetesPlan)
    assert (plain.restart_policy, plain.backoff_limit) == ("Never", None)
    assert (plain.pod.requests, plain.notes) == ({"cpu": "1"}, ())


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"host_network": True}, "host_network: pods see and use every port of their node"),
        ({"capabilities": ["IPC_LOCK"]}, "capabilities IPC_LOCK are kept"),
        ({"run_as_user": 0}, "run_as_user 0: the container runs as root"),
        ({"read_only_root": False}, "read_only_root is off: the image's files can be changed"),
    ],
)
def test_what_loosens_the_security_of_pods_is_noted(facts: dict[str, Any], note: str) -> None:
    profile = site("kubernetes", runs_claim="runs", pod_security="privileged", **facts)
    assert plan(job(), profile).notes == (f"profile 'a100' loosens the pods' security: {note}",)


def test_shared_memory_without_a_limit_of_memory_is_noted() -> None:
    profile = site("kubernetes", runs_claim="runs")
    (note,) = plan(job(resources={"shm": "1GiB"}), profile).notes
    assert note.startswith("resources.shm without memory")
    assert plan(job(resources={"shm": "1GiB", "memory": "2GiB"}), profile).notes == ()


@pytest.mark.parametrize(
    ("rule", "keys", "facts", "way_out"),
    [
        ("elastic-workload", "elastic", {"workload": "TrainJob"}, "`workload: PyTorchJob`"),
        ("elastic-workload", "elastic", {"workload": "JobSet"}, "`workload: PyTorchJob`"),
        ("elastic-workload", "elastic", {"workload": "Job"}, "`workload: PyTorchJob`"),
        (
            "elastic-master",
            "elastic",
            {"master": True, "pod_security": "baseline"},
            "leave out `master`",
        ),
        *(
            ("trainjob-cannot-say", keys, {"workload": "TrainJob", **facts}, "`workload: JobSet`")
            for keys, facts in (
                ({}, {"host_network": True, "pod_security": "privileged"}),
                ({}, {"gang_scheduler": "volcano"}),
                ({}, {"ttl": "1h"}),
                ({}, {"image_pull_policy": "Always"}),
                ({}, {"priority_class": "high"}),
                ({"kubernetes": {"priority_class": "high"}}, {}),
                ({"workdir": "/work"}, {}),
                ({"args": ["x"] * 118}, {}),
            )
        ),
        ("mount-forbidden", {"mounts": [mount("nfs:h:/x", "/x")]}, {}, "claim:NAME"),
        ("mount-forbidden", {}, {"mounts": [mount("nfs:h:/x", "/x")]}, "claim:NAME"),
        (
            "mount-forbidden",
            {"mounts": [mount("/x", "/x")]},
            {"pod_security": "baseline"},
            "claim:NAME",
        ),
        ("mount-unwritable", {"mounts": [mount("claim:a", "/x:y")]}, {}, "another path"),
        ("mount-unwritable", {}, {"runs_dir": "/x:y"}, "another path"),
        (
            "mount-unwritable",
            {"mounts": [mount("/x/../y", "/x")]},
            {"pod_security": "privileged"},
            "write the path out",
        ),
        (
            "mount-target-taken",
            {"mounts": [mount("claim:a", "/d/")]},
            {"mounts": [mount("claim:b", "/d")]},
            "two mounts have the target",
        ),
        ("variable-overwritten", {"env": {"logs": "x"}}, {}, "capital letters"),
        ("variable-overwritten", {}, {"env": {"host": "x"}}, "capital letters"),
        ("variable-overwritten", {"secrets": ["status"]}, {"secret": "s"}, "capital letters"),
    ],
)
def test_what_cannot_be_on_kubernetes_is_refused_with_a_way_out(
    rule: str, keys: Any, facts: dict[str, Any], way_out: str
) -> None:
    if keys == "elastic":
        keys = {"resources": {"nnodes": {"min": 1, "max": 2}}, "retries": {"in_job": 1}}
    with pytest.raises(PlanError) as error:
        plan(job(**keys), site("kubernetes", **facts))
    (problem,) = error.value.problems
    assert problem.rule == rule and way_out in problem.message


@pytest.mark.parametrize(
    ("source", "level"),
    [
        ("claim:a", "restricted"),
        ("configmap:a", "restricted"),
        ("secret:a", "restricted"),
        ("empty:1GiB", "restricted"),
        ("nfs:h:/x", "baseline"),
        ("/x", "privileged"),
    ],
)
def test_volumes_that_a_level_of_pod_security_allows_are_granted(source: str, level: str) -> None:
    plan(job(mounts=[mount(source, "/x")]), site("kubernetes", pod_security=level))


@pytest.mark.parametrize(
    ("kind", "longest"),
    [
        ("PyTorchJob", "-worker-99"),
        ("TrainJob", "-node-0-99-xxxxx"),
        ("JobSet", "-node-0-99-xxxxx"),
        ("Job", "-99-xxxxx"),
    ],
)
def test_the_longest_name_of_a_pod_decides(kind: str, longest: str) -> None:
    spec, profile = job(resources={"nnodes": 100}), site("kubernetes", workload=kind)
    fits = "a" * (63 - len(longest))
    assert plan(spec, profile, run_name=fits).run_name == fits  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=f"a{longest}' has 64 characters, more than 63"):
        plan(spec, profile, run_name=fits + "a")


@pytest.mark.parametrize(
    ("nnodes", "gpus", "devices"),
    [(1, 0, ((),)), (2, 0, ((), ())), (2, 1, ((0,), (1,))), (3, 2, ((0, 1), (2, 3), (4, 5)))],
)
def test_simulated_nodes_share_no_gpu(
    nnodes: int, gpus: int, devices: tuple[tuple[int, ...], ...]
) -> None:
    made = plan(job(resources={"nnodes": nnodes, "gpus_per_node": gpus}), site("local"))
    assert isinstance(made, LocalPlan) and made.visible_devices == devices


# ---- Size


def operations(work: Callable[[], object]) -> int:
    """Count the calls of Python functions, which are the same on a busy machine."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what other tests have left would be counted, too
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_4096_nodes_are_planned_and_rendered_like_2(kind: str) -> None:
    few, many = (job(resources={"nnodes": nnodes}) for nnodes in (2, 4096))
    profile = site(kind)
    texts = [render(plan(spec, profile)) for spec in (few, many)]
    assert texts[0].replace(few.digest, many.digest) == (
        texts[1].replace("4096", "2")  # its port numbers and ids hold no 4096
    )
    counts = [operations(lambda spec=spec: render(plan(spec, profile))) for spec in (few, many)]  # type: ignore[misc]
    assert counts[0] == counts[1]


@EVERYWHERE
def test_a_thousand_renders_in_one_process_are_the_same_and_cheap(kind: str) -> None:
    spec, profile = job(), site(kind)
    first = render(plan(spec, profile))
    started = time.process_time()
    assert {render(plan(spec, profile)) for _ in range(1000)} == {first}
    assert time.process_time() - started < 2


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


def test_who_joins_asks_for_one_node_and_never_comes_again() -> None:
    spec = job(resources=RANGE | {"gpus_per_node": 8}, retries={"in_job": 3, "requeue": 2})
    made = plan(spec, SlurmProfile(name="s", partition="gpu", gpu_type="h100"))
    assert made.join_sbatch == (
        ("job-name", "digits-join"),
        ("nodes", "1"),
        ("cpus-per-task", "1"),
        ("gpus-per-node", "h100:8"),
        ("partition", "gpu"),
        ("open-mode", "append"),
        ("no-requeue", None),
    )


def test_the_same_few_and_many_are_a_plain_number() -> None:
    spec = job(resources={"nnodes": {"min": 3, "max": 3}})
    assert plan(spec, site("slurm")).torchrun[0] == "--nnodes=3"
    assert dict(plan(spec, SlurmProfile(name="s")).sbatch)["nodes"] == "3"


@pytest.mark.parametrize(
    ("keys", "profile", "reason"),
    [
        ({}, {}, "nnodes with min and max needs retries.in_job: without it, no rank starts again "
         "after a node is lost or has come"),
        ({"retries": {"in_job": 1}}, {"gpus_flag": "gpus-per-task"},
         "nnodes with min and max cannot be had by gpus-per-task, since Slurm chooses how many "
         "tasks there are; write gpus_flag: gres"),
    ],
)  # fmt: skip
def test_what_a_range_of_nodes_needs(
    keys: dict[str, Any], profile: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(job(resources=RANGE, **keys), SlurmProfile(name="s", **profile))
    assert str(caught.value) == reason
