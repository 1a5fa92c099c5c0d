"""`toolkit init`: the detected facts and the profile; no query is sent twice."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.asked_slurm import CONFIG, sinfo
from tests.support.kubectl import kubectl_path
from toolkit.errors import InputError, ProfileError
from toolkit.profile.detect import Ask, Discovery, discover
from toolkit.profile.draft import draft, found_lines, keep_draft

# Recorded from Slurm 22.05.8 and shortened; the nodes of `main` are of two kinds.
NAMED = CONFIG.format("Ivy 2")
SINFO = sinfo("""\
main*|up|3-00:00:00|4|64|515072|gpu:a100:4(S:0-1)
main*|up|3-00:00:00|12|128+|1031168|gpu:h100:8,nvme:1
cpu|up|infinite|30|64|257024|(null)
old|down|infinite|2|16|64000|gpu:4
""")


def answers(**known: str) -> Ask:
    """Answer commands by their words; the others are not there."""

    def ask(argv: Sequence[str]) -> str | None:
        words = "_".join(argv).replace("-", "_")
        return next((said for key, said in known.items() if words.startswith(key)), None)

    return ask


IVY = {
    "scontrol_show_config": f"{NAMED}KillWait = 30 sec\nSLURM_VERSION = 22.05.8\n"
    "SelectType = select/cons_res\n",
    "sinfo__o": SINFO,
    "id": "uid=7(ada) gid=7(ada)\n",
    "sacctmgr__p_show_assoc": "Cluster|User|Account|\nc|ada|nlp|\nc|ada|vision|\n",
    "sacctmgr__p_show_user": "Cluster|User|Def Acct|\n|ada|vision|\n",
    "srun___help": "  --container-image=…  [pyxis]\n",
    "bash__lc": "Welcome to Ivy\n==module|function|==\n",
    "apptainer___version": "apptainer version 1.4\n",
}


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    return tmp_path / "venv"


def test_a_slurm_site_becomes_a_profile_with_comments(tmp_path: Path, venv: Path) -> None:
    found = discover(ask=answers(**IVY), environ={}, root=tmp_path, prefix=str(venv))
    made = draft(found)
    host = found.host
    assert made.name == "Ivy-2"
    assert (
        made.text
        == f"""\
# Slurm 22.05.8, cluster Ivy 2, as `toolkit init` found it on {host}.
# Every key: docs/reference/profiles.md. Fill in the lines that begin with # as needed.
kind: slurm

# Partitions:
#   main (default): 16 nodes, 128 CPUs, 1007GiB, 8 GPUs (a100/h100), time limit 3-00:00:00
#   cpu: 30 nodes, 64 CPUs, 251GiB, no GPUs, time limit infinite
partition: main
node: {{gpus: 8, cpus: 128, memory: 1007GiB}}  # its largest nodes
# gpu_type: a100  # where it matters which GPUs a job gets
gpus_flag: gres  # the select plugin does not support --gpus-per-node

account: vision  # there are also: nlp
# qos: NAME
kill_wait: 30s  # KillWait of the cluster

# Run directories: below the folder in which you submit, unless the path is absolute.
# All nodes must share this folder.
runs_dir: runs

# How workers run: bare (modules, venv); pyxis, apptainer or podman (in a job's image).
# Found on {host}: pyxis, apptainer.
runtime: bare
# modules: [cuda/12.8]  # `module avail` lists them
venv: {venv}  # it has no torchrun yet: pip install torch
"""
    )
    assert list(found_lines(found)) == [
        "Slurm 22.05.8, cluster Ivy 2",
        "  partition main (default): 16 nodes, 128 CPUs, 1007GiB, 8 GPUs (a100/h100), time limit "
        "3-00:00:00",
        "  partition cpu: 30 nodes, 64 CPUs, 251GiB, no GPUs, time limit infinite",
        "  accounts: vision, nlp",
        "Kubernetes: no kubeconfig names a context",
        "containers: pyxis, apptainer",
        "GPUs here: none",
        "modules: yes",
        f"virtual environment: {venv}, without torchrun",
    ]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CONDA_EXE": "/c/bin/conda", "CONDA_PREFIX": "/c/envs/x"}, "conda:/c/envs/x"),
        ({"CONDA_PREFIX": "/m/envs/x"}, "micromamba:/m/envs/x"),
        ({"CONDA_PREFIX": "/p/.pixi/envs/default", "PIXI_PROJECT_ROOT": "/p"}, "pixi:/p"),
        ({"PIXI_PROJECT_ROOT": "/p", "PIXI_ENVIRONMENT_NAME": "cuda"}, "pixi:/p#cuda"),
        ({"CONDA_EXE": "/c", "CONDA_PREFIX": "/a b"}, ""),
        ({}, ""),
    ],
)
def test_an_active_environment_of_conda_or_pixi_becomes_a_key(
    environ: dict[str, str], expected: str, tmp_path: Path, venv: Path
) -> None:
    def found(**more: str) -> Discovery:
        given = {**environ, **more}
        return discover(ask=answers(**IVY), environ=given, root=tmp_path, prefix="/none")

    assert found().environment == expected
    text = draft(found()).text
    assert (f"\nenvironment: {expected}\n" in text) == bool(expected)
    (tmp_path / "s.yaml").write_text(text)
    profile = toolkit.load_profile(str(tmp_path / "s.yaml"))
    assert isinstance(profile, toolkit.SlurmProfile)
    assert profile.environment == (expected or None)
    # A virtual environment that is active, too, was activated on purpose.
    assert not found(VIRTUAL_ENV=str(venv)).environment


KUBECONFIG = """\
apiVersion: v1
current-context: "012"
contexts:
- {name: lab, context: {cluster: c, user: u, namespace: research}}
- {name: "012", context: {cluster: c, user: u}}
users:
- {name: u, user: {token: never-shown}}
"""


def test_contexts_of_a_kubeconfig_become_a_profile(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(KUBECONFIG)
    (tmp_path / "two").write_text(KUBECONFIG.replace("research", "other").replace("012", "x"))
    environ = {"KUBECONFIG": f"{tmp_path}/none:{tmp_path}/one:{tmp_path}/two"}
    found = discover(ask=answers(), environ=environ, root=tmp_path, prefix="")
    shown = [(c.name, c.namespace, c.current) for c in found.contexts]
    assert shown == [("lab", "research", False), ("012", "default", True), ("x", "default", False)]
    made = draft(found)
    assert made.name == "012"
    assert (
        made.text
        == f"""\
# Kubernetes, context 012, as `toolkit init` found it on {found.host}.
# Every key: docs/reference/profiles.md. Fill in the lines that begin with # as needed.
kind: kubernetes
context: "012"  # there are also: lab, x
namespace: default
# workload: TrainJob  # or JobSet, or Job; PyTorchJob by default

# runs_claim: NAME  # a PersistentVolumeClaim; without one that all nodes can write to, \
checkpoints are lost with their pod
# secret: NAME  # the Secret for the job's `secrets`
# node: {{gpus: 8}}  # the size of a node; jobs that cannot fit are then refused
# node_selector: {{LABEL: VALUE}}
"""
    )


def facts(folder: Path, server: FakeKubernetes) -> tuple[list[str], list[str]]:
    """Return the facts detected in a cluster, and the draft of the profile."""
    environ = {"KUBECONFIG": str(folder / "config")}
    server.kubeconfig(folder / "config")
    found = discover(environ=environ, root=folder, prefix="")
    lines = draft(found).text.splitlines()
    return list(found_lines(found))[2:5], lines[4:-3]


def test_what_a_cluster_serves_and_a_namespace_holds_is_in_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", kubectl_path())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with FakeKubernetes() as server:
        for kind in ("claim", "kueue/queue", "trainer/runtime"):
            server.apply((ROOT / f"k8s/base/{kind}.yaml").read_text())
        level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
        server.patch("Namespace", "default", level)
        assert facts(tmp_path, server) == (
            [
                "  workloads: PyTorchJob, TrainJob, JobSet, Job",
                "  queues: training",
                "  shared claims: runs",
            ],
            [
                "namespace: default",
                "workload: PyTorchJob  # there are also: TrainJob, JobSet, Job",
                "pod_security: baseline",
                "queue: training",
                "",
                "runs_claim: runs",
            ],
        )
    with FakeKubernetes(without=("kubeflow.org", "kueue.x-k8s.io")) as server:
        assert facts(tmp_path, server)[1][1:3] == [
            "workload: TrainJob  # there are also: JobSet, Job",
            "# TrainJobs need a runtime: kubectl apply -n default -k k8s/base/trainer",
        ]
    with FakeKubernetes(operator=False) as server:
        assert facts(tmp_path, server)[1][1] == "workload: Job"


def test_only_the_claim_called_runs_is_taken_for_run_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", kubectl_path())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    runs = (ROOT / "k8s/base/claim.yaml").read_text()
    with FakeKubernetes(operator=False) as server:
        server.apply(runs.replace("name: runs", "name: datasets"))
        assert facts(tmp_path, server)[1][-1] == (
            "# runs_claim: NAME  # a PersistentVolumeClaim (there are: datasets); without one that "
            "all nodes can write to, checkpoints are lost with their pod"
        )
        server.apply(runs)
        assert facts(tmp_path, server)[1][-1] == "runs_claim: runs  # there are also: datasets"


def test_a_pod_finds_its_own_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount"
    folder.mkdir(parents=True)
    (folder / "namespace").write_text("research\n")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    found = discover(ask=answers(), environ=environ, root=tmp_path, prefix="")
    made = draft(found)
    assert made.name == "k8s"
    assert "kind: kubernetes\nnamespace: research\n" in made.text


def test_this_machine_becomes_a_profile(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    ask = answers(nvidia_smi__L="GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: x)\n")
    found = discover(ask=ask, environ={}, root=tmp_path, prefix="")
    assert found.gpus == ("NVIDIA H100", "NVIDIA H100")
    made = draft(found)
    cpus = os.cpu_count()
    assert made.text.splitlines()[2:] == [
        "kind: local",
        f"node: {{gpus: 2, cpus: {cpus}, memory: 16GiB}}",
        "runs_dir: runs  # below the folder in which you start",
    ]


def site(name: str, tmp_path: Path) -> str:
    """Return the draft of a site, by name."""
    (tmp_path / "one").write_text(KUBECONFIG)
    ask = answers(**IVY) if name == "slurm" else answers()
    environ = {"KUBECONFIG": str(tmp_path / "one")} if name == "kubernetes" else {}
    return draft(discover(ask=ask, environ=environ, root=tmp_path, prefix="")).text


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "local"])
def test_every_draft_is_a_profile_that_loads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(site(kind, tmp_path))
    assert toolkit.load_profile(str(path)).kind == kind


def test_hostile_words_of_a_site_break_no_profile(tmp_path: Path) -> None:
    words = "no|a#b: 'c'|\x1b[0m"
    ask = answers(
        scontrol_show_config=CONFIG.format(f"../{words}") + "KillWait = 30 sec\n",
        sinfo__o=sinfo("no*|up|1|1|1|1|(null)\n"),
        id="uid=7(ada) gid=7(ada)\n",
        sacctmgr__p_show_assoc="Cluster|User|Account|\nc|ada|012|\n",
        sacctmgr__p_show_user="Cluster|User|Def Acct|\n|ada|012|\n",
    )
    made = draft(discover(ask=ask, environ={}, root=tmp_path, prefix=""))
    assert "/" not in made.name
    path = tmp_path / "site.yaml"
    path.write_text(made.text)
    read = toolkit.load_profile(str(path))
    assert isinstance(read, toolkit.SlurmProfile)
    assert (read.partition, read.account) == ("no", "012")


def test_what_is_wanted_and_not_there_is_told(tmp_path: Path) -> None:
    found = discover(ask=answers(), environ={}, root=tmp_path, prefix="")
    with pytest.raises(InputError, match="no Slurm cluster answers here"):
        draft(found, kind="slurm")
    with pytest.raises(InputError, match="no kubeconfig names a context"):
        draft(found, kind="kubernetes")
    assert draft(found, name="mine").name == "mine"
    for name in ("a/b", "../x", "", ".hidden"):
        with pytest.raises(InputError, match=r"--name: .* cannot be a profile's name"):
            draft(found, name=name)


# ---- The file, and the default profile


def test_a_profile_is_never_overwritten_without_force(own_user: Path, tmp_path: Path) -> None:
    made = draft(discover(ask=answers(), environ={}, root=tmp_path, prefix=""))
    folder = own_user / "config/torch-deploy-toolkit"
    path = folder / "profiles/local.yaml"
    assert keep_draft(made) == (path, True)
    assert toolkit.default_profile() == str(path)
    path.write_text("kind: local # mine\n")
    with pytest.raises(InputError, match="exists already; --force"):
        keep_draft(made)
    assert path.read_text() == "kind: local # mine\n"
    assert keep_draft(made, force=True) == (path, True)
    assert path.read_text() == made.text


def test_another_default_stays_unless_forced(own_user: Path, tmp_path: Path) -> None:
    found = discover(ask=answers(), environ={}, root=tmp_path, prefix="")
    first, _ = keep_draft(draft(found, name="first"))
    other = tmp_path / "other.yaml"
    assert keep_draft(draft(found), output=other) == (other, False)
    assert toolkit.default_profile() == str(first)
    assert keep_draft(draft(found), output=other, force=True) == (other, True)
    assert toolkit.default_profile() == str(other)


def test_a_folder_that_cannot_be_written_is_a_message(own_user: Path, tmp_path: Path) -> None:
    made = draft(discover(ask=answers(), environ={}, root=tmp_path, prefix=""))
    (own_user / "config").write_text("a file")
    with pytest.raises(InputError, match=r"cannot be written: (Not a directory|File exists)"):
        keep_draft(made)


Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def run(*argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [TOOLKIT, *argv],
            cwd=folder,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("command", ["render", "submit"])
def test_without_a_default_profile_the_way_out_is_told(program: Program, command: str) -> None:
    done = program(command, str(ROOT / "jobs/digits.yaml"))
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "no profile is selected, and there is no default profile: name one with --to, or run "
        "`toolkit init`, which detects the site and writes a profile\n",
    )


def test_a_default_that_has_gone_is_told(own_user: Path, program: Program) -> None:
    folder = own_user / "config/torch-deploy-toolkit"
    folder.mkdir(parents=True)
    (folder / "default").write_text("profiles/gone.yaml\n")
    done = program("render", str(ROOT / "jobs/digits.yaml"))
    gone = f"{folder}/profiles/gone.yaml: cannot be read: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", gone)
    (folder / "default").write_bytes(b"\xff")
    with pytest.raises(ProfileError, match="default cannot be read"):
        toolkit.default_profile()


def test_the_default_profile_is_what_check_render_and_submit_take(program: Program) -> None:
    job = str(ROOT / "jobs/digits.yaml")
    assert program("init", "--kind", "local").returncode == 0
    done = program("check", job)
    assert done.stdout.endswith("profiles/local.yaml: 2 x 1 processes\n"), done.stderr
    assert program("render", job).stdout == program("render", job, "--to", "local").stdout


def test_print_only_shows(own_user: Path, program: Program) -> None:
    done = program("init", "--print", "--kind", "local")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2] == "kind: local"
    assert not (own_user / "config").exists()


@pytest.mark.slow
@pytest.mark.slurm
def test_after_init_the_first_submit_needs_no_option(
    cluster: Cluster, program: Program, tmp_path: Path, own_user: Path
) -> None:
    environ = {**cluster.environ, "PYTHONPATH": str(ROOT)}
    environ |= {name: os.environ[name] for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    done = program("init", **environ)
    path = own_user / "config/torch-deploy-toolkit/profiles/sandbox.yaml"
    assert done.returncode == 0, done.stderr
    *found, nothing, written, after = done.stdout.splitlines()
    assert found[0].startswith("Slurm ")
    assert "  partition main (default): 4 nodes, 8 CPUs, 256GiB, 8 GPUs (h100), " in found[1]
    assert (nothing, written) == ("", f"written: {path}, the default profile from now on")
    assert after == "next: read it, then `toolkit submit JOB.yaml --follow`"

    job = str(ROOT / "jobs/digits.yaml")
    checked = program("check", job, "--server", **environ)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    submitted = program("submit", job, **environ)
    assert submitted.returncode == 0, submitted.stderr
    uri = submitted.stdout.strip()
    ended = program("wait", uri, **environ)
    assert ended.returncode == 0, ended.stderr
    assert "SUCCEEDED" in ended.stderr
    shutil.rmtree(tmp_path / "work/runs")


def test_the_largest_of_several_kinds_of_nodes_counts(tmp_path: Path) -> None:
    each = sinfo("cpu*|up|1:00|20|32|128000|(null)\ncpu*|up|1:00|10|128|1024000|(null)\n")
    merged = sinfo("cpu*|up|1:00|30|32+|128000+|(null)\n")

    def ask(argv: Sequence[str]) -> str | None:
        if argv[0] == "sinfo":
            return each if {"-e", "--exact"} & set(argv) else merged  # as sinfo(1) says
        return answers(**IVY)(argv)

    text = draft(discover(ask=ask, environ={}, root=tmp_path, prefix="")).text
    assert "node: {gpus: 0, cpus: 128, memory: 1000GiB}" in text


def test_an_active_environment_goes_before_the_toolkits_own_without_torch(
    tmp_path: Path, venv: Path
) -> None:
    environ = {"CONDA_EXE": "/c/bin/conda", "CONDA_PREFIX": "/c/envs/x"}
    found = discover(ask=answers(), environ=environ, root=tmp_path, prefix=str(venv))
    assert (found.venv, found.environment) == (None, "conda:/c/envs/x")
    (venv / "bin/torchrun").touch()
    found = discover(ask=answers(), environ=environ, root=tmp_path, prefix=str(venv))
    assert (found.venv, found.environment) == (venv, "")


@pytest.mark.parametrize("text", ["contexts: 3\n", "a: 2024-13-45\n", "[" * 5000])
def test_a_broken_kubeconfig_names_no_context(text: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    environ = {"KUBECONFIG": str(tmp_path / "config")}
    assert discover(ask=answers(), environ=environ, root=tmp_path, prefix="").contexts == ()
