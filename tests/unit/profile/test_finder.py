"""Profiles: the file that is chosen, and its problems."""

from pathlib import Path

import pytest
import yaml

import toolkit
from toolkit.errors import ProfileError
from toolkit.profile import (
    KubernetesProfile,
    LocalProfile,
    NodeFacts,
    SlurmProfile,
    load_profile,
    profile_names,
)

ROOT = Path(__file__).parents[3]
COMMITTED = sorted([*ROOT.glob("slurm/profiles/*.yaml"), *ROOT.glob("k8s/profiles/*.yaml")])


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Site:
    """A project and a user with profiles of the same name, and none of the built-in ones."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.config = folder / "config"
        self.user = self.config / "torch-deploy-toolkit" / "profiles"
        self.project.mkdir()

    def load(self, name: str, *, below: str = ".") -> toolkit.Profile:
        return load_profile(name, folder=self.project / below, environ=self.environ)

    def names(self) -> list[str]:
        return profile_names(folder=self.project, environ=self.environ)

    @property
    def environ(self) -> dict[str, str]:
        return {"XDG_CONFIG_HOME": str(self.config)}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path))
    return str(caught.value)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_profiles_load(path: Path) -> None:
    assert load_profile(str(path)).name == path.stem


def test_a_name_is_looked_up_from_the_project_to_the_built_in(site: Site) -> None:
    files = [
        write(site.project / "slurm/profiles", "slurm", "kind: slurm\npartition: of-slurm\n"),
        write(site.project / "k8s/profiles", "slurm", "kind: slurm\npartition: of-k8s\n"),
        write(site.user, "slurm", "kind: slurm\npartition: of-user\n"),
    ]
    for file, partition in zip(files, ["of-slurm", "of-k8s", "of-user"], strict=True):
        assert site.load("slurm") == SlurmProfile(name="slurm", partition=partition)
        file.unlink()
    assert site.load("slurm") == SlurmProfile(name="slurm")


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("local", LocalProfile(name="local")),
        ("slurm", SlurmProfile(name="slurm")),
        ("k8s", KubernetesProfile(name="k8s")),
    ],
)
def test_every_place_has_a_built_in_profile(
    site: Site, name: str, profile: toolkit.Profile
) -> None:
    assert site.load(name) == profile


def test_profiles_are_found_from_folders_below_and_the_nearest_project_wins(site: Site) -> None:
    (site.project / "jobs/deep").mkdir(parents=True)
    write(site.project / "k8s/profiles", "a", "kind: kubernetes\nnamespace: outer\n")
    assert site.load("a", below="jobs/deep") == KubernetesProfile(name="a", namespace="outer")
    write(site.project / "jobs/k8s/profiles", "a", "kind: kubernetes\nnamespace: inner\n")
    assert site.load("a", below="jobs/deep") == KubernetesProfile(name="a", namespace="inner")
    # The nearest folder with profiles is the project; folders above are not searched.
    write(site.project / "k8s/profiles", "b", "kind: local\n")
    with pytest.raises(ProfileError, match=r"^no profile 'b'; valid are a, k8s, local, slurm"):
        site.load("b", below="jobs/deep")


def test_the_users_folder_is_below_home_where_xdg_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / ".config/torch-deploy-toolkit/profiles", "mine", "kind: local\n")
    for environ in ({"HOME": str(tmp_path)}, {"HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}):
        assert load_profile("mine", folder=tmp_path, environ=environ) == LocalProfile(name="mine")


def test_an_unknown_name_gets_the_nearest_one_and_the_folders_searched(site: Site) -> None:
    write(site.project / "slurm/profiles", "alpha", "kind: slurm\n")
    write(site.user, "beta", "kind: local\n")
    assert site.names() == ["alpha", "beta", "k8s", "local", "slurm"]
    searched = f"(searched {site.project}/slurm/profiles, {site.user}; a path works too)"
    for name, way_out in [
        ("alhpa", "did you mean 'alpha'?"),
        ("lcoal", "did you mean 'local'?"),
        ("zzz", "valid are alpha, beta, k8s, local, slurm"),
        ("", "valid are alpha, beta, k8s, local, slurm"),
        ("x" * 300, "valid are alpha, beta, k8s, local, slurm"),
        ("*", "valid are alpha, beta, k8s, local, slurm"),
    ]:
        with pytest.raises(ProfileError) as caught:
            site.load(name)
        assert str(caught.value) == f"no profile {name!r}; {way_out} {searched}"


@pytest.mark.parametrize("name", ["here.yaml", "here.yml", "./sub/there"])
def test_a_path_is_read_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("kind: slurm\n")
    assert load_profile(name) == SlurmProfile(name=path.stem)
    path.write_text("kind: slurm\nname: mine\n")
    assert load_profile(name) == SlurmProfile(name="mine")


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == (
        f"{tmp_path}/no.yaml: cannot be read: No such file or directory"
    )
    (tmp_path / "a.yaml").mkdir()
    assert refusal(tmp_path / "a.yaml") == f"{tmp_path}/a.yaml: cannot be read: Is a directory"


CHOICES = "valid are local, slurm, kubernetes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "PATH: the file is empty"),
        ("- kind: slurm\n", "PATH:1: the file is not a mapping of keys to values"),
        ("slurm\n", "PATH:1: the file is not a mapping of keys to values"),
        ("partition: gpu\n", f"PATH:1: the key 'kind' is missing; {CHOICES}"),
        ("kind:\n", f"PATH:1: the key 'kind' is missing; {CHOICES}"),
        ("a: b\nkind: slrum\n", "PATH:2: kind: 'slrum' is not a choice; did you mean 'slurm'?"),
        ("kind: k8s\n", f"PATH:1: kind: 'k8s' is not a choice; {CHOICES}"),
        ("kind: no\n", f"PATH:1: kind: 'no' is not a choice; {CHOICES}"),
        ("kind: 3\n", f"PATH:1: kind: 3 is not a choice; {CHOICES}"),
        ("kind: {a: b}\n", f"PATH:1: kind: {{'a': 'b'}} is not a choice; {CHOICES}"),
        ("kind: [{a: b}]\n", f"PATH:1: kind: ({{'a': 'b'}},) is not a choice; {CHOICES}"),
        (
            "kind: x\nname: a\nname: b\n",
            f"PATH:1: kind: 'x' is not a choice; {CHOICES}\n"
            "PATH:3: duplicate key 'name'; the first is at PATH:2",
        ),
        ("kind: slurm\n\tname: a\n", "PATH:2: a tab; YAML is indented with spaces"),
    ],
)
def test_a_profile_says_what_kind_it_is(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "site", text)
    assert refusal(path) == message.replace("PATH", str(path))


BAD_SLURM = """\
kind: slurm
name: 012
node: {gpus: -1, cpus: 0, memory: 64, disk: 1TB}
env: {SLURM_MEM: "1", LR: 1e-3}
network_interface: ""
runs_dir: ~/runs
partition: ""
account: a b
qos: no
gpu_type: ""
kill_wait: 30
modules: [cuda, "", 3.10]
venv: "~/venv"
namespace: default
"""

BAD_SLURM_PROBLEMS = """\
PATH:2: name: 012 is 10 to YAML 1.1 and 12 to YAML 1.2; write "012" if you mean the text
PATH:3: node.gpus: must be at least 0, not -1
PATH:3: node.cpus: must be at least 1, not 0
PATH:3: node.memory: '64' has no unit; write it like 64GiB or 64MiB
PATH:3: unknown key 'disk' under 'node'; valid are gpus, cpus, memory
PATH:4: env.SLURM_MEM: 'SLURM_MEM' is set by torchrun, the scheduler or the toolkit; leave it out
PATH:4: env.LR: 1e-3 is a number to YAML 1.2; write "1e-3" if you mean the text
PATH:5: network_interface: '' cannot be used; write one word, or leave the key out
PATH:6: runs_dir: '~/runs' is not expanded; write the whole path
PATH:7: partition: '' cannot be used; write one word, or leave the key out
PATH:8: account: 'a b' cannot be used; write one word, or leave the key out
PATH:9: qos: no is a boolean to YAML 1.1; write "no" if you mean the text
PATH:10: gpu_type: '' cannot be used; write one word, or leave the key out
PATH:11: kill_wait: '30' has no unit; write 30s, 30m or 30h
PATH:12: modules[1]: '' cannot be used; write one word, or leave the key out
PATH:12: modules[2]: 3.10 is not a string to YAML; write "3.10"
PATH:13: venv: '~/venv' is not expanded; write the whole path
PATH:14: unknown key 'namespace'; did you mean 'name'?
"""

BAD_KUBERNETES = """\
kind: kubernetes
namespace: Default
pod_security: restrictive
run_as_user: -1
node_selector: {gpu: yes}
runs_dir: runs
runs_claim: My_Claim
image_pull_policy: always
partition: gpu
"""

BAD_KUBERNETES_PROBLEMS = """\
PATH:2: namespace: 'Default' cannot be used; write a Kubernetes object name
PATH:3: pod_security: 'restrictive' is not a choice; did you mean 'restricted'?
PATH:4: run_as_user: must be at least 0, not -1
PATH:5: node_selector.gpu: yes is a boolean to YAML 1.1; write "yes" if you mean the text
PATH:6: runs_dir: 'runs' must be an absolute path; it is the same on every node
PATH:7: runs_claim: 'My_Claim' cannot be used; write a Kubernetes object name
PATH:8: image_pull_policy: 'always' is not a choice; did you mean 'Always'?
PATH:9: unknown key 'partition'; valid are version, name, node, env, network_interface, price, \
notify, templates_dir, kind, workload, namespace, context, master, training_runtime, queue, \
queue_priority, gang_scheduler, pod_security, run_as_user, read_only_root, capabilities, \
host_network, network_policy, egress, service, gpu_resource, resources, node_selector, \
tolerations, lost_node_toleration, one_pod_per_node, topology, priority_class, service_account, \
image_pull_secrets, image_pull_policy, runs_dir, runs_claim, mounts, secret, ttl, supervisor, \
patches
"""


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("cheap", "must be a number, not 'cheap'"),
        ("-1", "must be at least 0, not -1"),
        (".inf", "must be a finite number, not .inf"),
        ("true", "must be a number, not true"),
    ],
)
def test_a_price_is_a_number(tmp_path: Path, written: str, reason: str) -> None:
    path = write(tmp_path, "site", f"kind: local\nprice: {{rank_hour: {written}}}\n")
    assert refusal(path) == f"{path}:2: price.rank_hour: {reason}"


@pytest.mark.parametrize(
    ("text", "problems"),
    [(BAD_SLURM, BAD_SLURM_PROBLEMS), (BAD_KUBERNETES, BAD_KUBERNETES_PROBLEMS)],
    ids=["slurm", "kubernetes"],
)
def test_every_mistake_of_a_profile_is_reported_at_once(
    tmp_path: Path, text: str, problems: str
) -> None:
    path = write(tmp_path, "site", text)
    assert refusal(path) + "\n" == problems.replace("PATH", str(path))


def test_a_gpu_resource_that_is_no_name_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "site", "kind: kubernetes\ngpu_resource: {a: b}\nresources: {x/y: 1}\n")
    assert "gpu_resource: must be" in refusal(path)


def test_a_profile_arrives_as_it_was_written(tmp_path: Path) -> None:
    facts = {"gpus": 8, "cpus": 96, "memory": "900GiB"}
    path = write(tmp_path, "big", yaml.safe_dump({"kind": "slurm", "node": facts, "qos": "high"}))
    profile = load_profile(str(path))
    assert profile == SlurmProfile(
        name="big", node=NodeFacts(gpus=8, cpus=96, **{"memory": "900GiB"}), qos="high"
    )
    assert profile.node.memory_bytes == 900 * 2**30


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("via: login1", "PATH:2: via: 'login1' cannot be used; write ssh HOST or ssh USER@HOST"),
        ("via: ssh -p 22 login1", "PATH:2: via: 'ssh -p 22 login1' cannot be used"),
        ("via: ssh -oProxyCommand=x", "PATH:2: via: 'ssh -oProxyCommand=x' cannot be used"),
        ("via: ssh é", "PATH:2: via: 'ssh é' cannot be used; write ssh HOST or ssh USER@HOST"),
        ("via: ssh lоgin1", "PATH:2: via: 'ssh lоgin1' cannot be used"),  # noqa: RUF001  Cyrillic
        ("via: ssh a\nremote_dir: work", "PATH:3: remote_dir: 'work' cannot be used; write /PATH"),
        ("remote_dir: /work", "PATH: remote_dir needs via"),
    ],
)
def test_a_login_node_is_named_as_ssh_knows_it(tmp_path: Path, lines: str, message: str) -> None:
    path = write(tmp_path, "far", f"kind: slurm\n{lines}\n")
    said = refusal(path).replace(str(path), "PATH")
    assert message in said.replace("PATH:1:", "PATH:")


@pytest.mark.parametrize("host", ["login1", "me@login-1.site.example"])
def test_relative_paths_of_a_far_profile_are_below_its_folder_there(
    tmp_path: Path, host: str
) -> None:
    path = write(tmp_path, "far", f"kind: slurm\nvia: ssh {host}\nvenv: my venv\n")
    profile = load_profile(str(path))
    assert isinstance(profile, SlurmProfile)
    assert profile.host == host
    script = toolkit.render(toolkit.plan(toolkit.load(ROOT / "jobs/digits.yaml"), profile))
    assert "\nsource ~/'torch-deploy-toolkit/my venv/bin/activate'\n" in script
    assert "_run_dir=${1:-~/torch-deploy-toolkit/runs/digits-$SLURM_JOB_ID}\n" in script
    moved = profile.model_copy(update={"remote_dir": "/work/me/", "runs_dir": "/scratch"})
    assert (moved.below("x"), moved.below(moved.runs_dir)) == ("/work/me/x", "/scratch")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("run_as_user: 0", "run_as_user 0 violates Pod Security 'restricted'"),
        ("host_network: true\npod_security: baseline", "host_network violates Pod Security 'base"),
        (
            "capabilities: [IPC_LOCK]\nrun_as_user: 0\npod_security: baseline",
            "capabilities: IPC_LOCK violates Pod Security 'baseline'",
        ),
        (
            "capabilities: [CHOWN]\nrun_as_user: 0",
            "capabilities violates Pod Security 'restricted', so the cluster would refuse the "
            "pods; leave it out, or set what the namespace allows: pod_security: baseline",
        ),
        (
            "capabilities: [IPC_LOCK]\npod_security: privileged",
            "capabilities without run_as_user: 0: a process gets added capabilities only as root",
        ),
        ("queue_priority: high", "queue_priority without a queue"),
        ("gpu_resource: x/y\nresources: {x/y: 1}", "'x/y' is what gpus_per_node of a job asks for"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(site: Site, keys: str, problem: str) -> None:
    path = write(site.user, "k", f"kind: kubernetes\n{keys}\n")
    assert problem in refusal(path)


def test_capabilities_that_the_namespace_allows_are_accepted(site: Site) -> None:
    keys = "capabilities: [CHOWN, KILL]\nrun_as_user: 0\npod_security: baseline"
    profile = load_profile(str(write(site.user, "k", f"kind: kubernetes\n{keys}\n")))
    assert isinstance(profile, KubernetesProfile)
    assert profile.capabilities == ("CHOWN", "KILL")


@pytest.mark.parametrize("name", ["CAP_IPC_LOCK", "ipc_lock", "IPC-LOCK"])
def test_capabilities_are_written_as_kubernetes_does(site: Site, name: str) -> None:
    path = write(site.user, "k", f"kind: kubernetes\ncapabilities: [{name}]\n")
    with pytest.raises(ProfileError, match="write it without CAP_, like IPC_LOCK"):
        load_profile(str(path))


@pytest.mark.parametrize("path", ["/scratch/$USER/runs", "$HOME/runs", "${SCRATCH}/runs"])
def test_a_variable_in_a_folder_is_refused_as_a_tilde_is(path: str, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"kind: slurm\nruns_dir: {path}\n")
    with pytest.raises(ProfileError, match="is not expanded; write the whole path"):
        load_profile(str(file))
