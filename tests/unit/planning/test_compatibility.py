"""What a site does not have: every reason why a job cannot work there, all at once."""

from typing import Any

import pytest

import toolkit
from tests.support.planned import EVERYWHERE, job, refusal, site
from toolkit.errors import PlanError
from toolkit.job.spec import Secret
from toolkit.planning import plan
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.slurm import SlurmPlan

# ---- Jobs that do not fit


LONGER = "; set a longer time_limit, or a shorter stop: {grace: …}"


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
            "nproc_per_node 4 exceeds gpus_per_node 2; each worker needs its own GPU",
        ),
        ({"cpus_per_node": 97}, "cpus_per_node 97 exceeds the 96 CPUs per node of profile 'a100'"),
        ({"nproc_per_node": 97}, "cpus_per_node 97 exceeds the 96 CPUs per node of profile 'a100'"),
        ({"memory": "901GiB"}, "memory 901GiB exceeds the 900GiB per node of profile 'a100'"),
        (
            {"memory": "64GiB", "shm": "65536MiB"},
            "shm 64GiB uses all of memory 64GiB, and shm counts as memory",
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
            f"stop.grace 1m does not fit: stop.grace alone takes 1m, and time_limit is 1m{LONGER}",
        ),
        (
            "slurm",
            60 + 30 + 60,
            "stop.grace 1m does not fit: stop.grace, 30s to requeue and up to 60s that Slurm warns "
            f"early takes 2m30s, and time_limit is 2m30s{LONGER}",
        ),
        (
            "kubernetes",
            60 + 15,
            "stop.grace 1m does not fit: stop.grace and 15s for torchrun to end takes 1m15s, "
            f"and time_limit is 1m15s{LONGER}",
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
            "mounts[0]: a mount at '/' would hide a folder of the container; choose another "
            "target, like /data",
        ),
        (
            "kubernetes",
            {"runs_dir": "/dev/"},
            [],
            "runs_dir '/dev/' of profile 'a100' would hide a folder of the container; write "
            "a separate folder, like /runs",
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
        f"image {image!r} is not an image name that nodes of profile 'a100' can pull; write it "
        "like registry.example.com/team/train:1.2"
    )


def test_kubernetes_needs_to_know_where_secrets_are() -> None:
    spec = job(secrets={"A": None, "B": {"secret": "s", "key": "k"}, "C": None})
    assert refusal(spec, site("kubernetes")).splitlines() == [
        f"secrets: {name} has no source; write {{{name}: {{secret: …, key: …}}}} in the job, or "
        "the key 'secret' in profile 'a100'"
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
        f"and time_limit is 10s{LONGER}",
        "profile 'a100' runs containers; the job needs the key 'image'",
        "secrets: S has no source; write {S: {secret: …, key: …}} in the job, or the key "
        "'secret' in profile 'a100'",
        "mounts[0]: Pod Security 'restricted' of profile 'a100' allows no folder of the node "
        "('/a'); write claim:NAME",
    ]


# ---- What cannot be on Kubernetes


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
                ({"env": {f"V{index}": "x" for index in range(128)}}, {}),
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
            "write the full path",
        ),
        (
            "mount-target-taken",
            {"mounts": [mount("claim:a", "/d/")]},
            {"mounts": [mount("claim:b", "/d")]},
            "two mounts have the target",
        ),
        ("variable-overwritten", {"env": {"_logs": "x"}}, {}, "use another name"),
        ("variable-overwritten", {}, {"env": {"_host": "x"}}, "use another name"),
        ("variable-overwritten", {"secrets": ["_status"]}, {"secret": "s"}, "use another name"),
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
    ("keys", "what"),
    [
        ({"start": "warm"}, "start: warm"),
        ({"log_pattern": "(?P<step>[0-9]+)"}, "log_pattern"),
        ({"resources": {"nnodes": {"min": 1, "max": 2}}, "retries": {"in_job": 1}}, "nnodes"),
    ],
)
def test_what_the_supervisor_does_is_refused_without_it(keys: dict[str, Any], what: str) -> None:
    site = toolkit.SlurmProfile(name="s", supervisor="none")
    job = toolkit.JobSpec.model_validate({"name": "x", "script": "x.py", **keys})
    with pytest.raises(toolkit.InputError, match=rf"{what}.* needs the supervisor"):
        toolkit.plan(job, site)
