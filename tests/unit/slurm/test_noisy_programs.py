"""What other programs print is data: banners, warnings and colours neither make nor hide a value.

Each reader is driven whole, with programs on PATH that print noise around their answers.
"""

import ast
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import toolkit
from tests.conftest import ROOT
from tests.support.asked_slurm import ACCOUNTED, CONFIG, JOBS, PLACES, job_row, sinfo
from toolkit.errors import LauncherError
from toolkit.local.train_arguments import train_problems
from toolkit.profile.detect import discover
from toolkit.runs.records import provenance
from toolkit.runs.state import RunState
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.commands import ask_accounting, ask_jobs, ask_mine, ask_places, run_command
from toolkit.slurm.login.host import RunFolder
from toolkit.slurm.login.ssh import Lost, SshConnection
from toolkit.slurm.login.ssh_host import working_tree
from toolkit.slurm.site_check import account_findings, path_findings, slurm_version
from toolkit.slurm.snapshot import SnapshotCache

BANNER = "*** Welcome to Ivy, ada: 2 jobs of yours are RUNNING ***\n"
LIKE_DATA = """\
123
123;c
n1 idle
12345|RUNNING|0:0|x
row|12345|RUNNING|N/A|None|x|
Cluster|User|Account|
ClusterName = elsewhere
KillWait = 1 sec
SLURM_VERSION = 1.2.3
PartitionName=evil State=DOWN Default=YES
uid=0 (root)
GPU 7: an announcement
--container-image is there
function
alias
{"items": [1]}
{
"""
"""Lines that are nearly of the forms that are read, with too few fields."""

WARNINGS = "warning: the controller is slow\n"


def in_colour(text: str) -> str:
    lines = "".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in f"{BANNER}{text}".splitlines())
    return f"\x1b]0;ivy\x07{lines}\x1b(B\x1b[m"


NOISE: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: text,
    "before": lambda text: BANNER + text,
    "after": lambda text: text + BANNER,
    "both": lambda text: BANNER + text + BANNER,
    "without a newline": lambda text: f"Loading cuda/12.8 ... {text}",
    "colours": in_colour,
    "CRLF": lambda text: f"{BANNER}{text}{BANNER}".replace("\n", "\r\n"),
    "like data": lambda text: LIKE_DATA + text + LIKE_DATA,
    "within": lambda text: text.replace("\n", f"\n{WARNINGS}"),
}

SCONTROL = f"""\
{CONFIG.format("c")}AccountingStorageEnforce = associations,limits,qos
KillWait                = 30 sec
PreemptMode             = OFF
SLURM_VERSION           = 23.02.5
"""
PARTITIONS = (
    "PartitionName=gpu Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=1:00:00 State=UP "
    "TotalNodes=2\n"
)
JOB_ROWS = job_row(7, "RUNNING") + job_row(8, "PENDING", reason="Resources", command="two\nlines")
PLACE_ROWS = "row|==|9|==|20|==|gpu|==|Priority|==|\nrow|==|8|==|10|==|gpu|==|Resources|==|\n"
ACCOUNT_ROWS = "c|==|7|==|CANCELLED by 0|==|0:15|==|sbatch x|==|\n"

ANSWERS: dict[str, dict[str, str]] = {
    "squeue": {"*PENDING*": PLACES + PLACE_ROWS, "*": JOBS + JOB_ROWS},
    "sacct": {"*": ACCOUNTED + ACCOUNT_ROWS},
    "scontrol": {"*partition*": PARTITIONS, "*": SCONTROL},
    "sbatch": {"*--usage": "Usage: sbatch\n", "*": "Submitted batch job 7\n"},
    "sinfo": {"*": sinfo("gpu*|up|1:00:00|2|64|1000|gpu:a100:4\n")},
    "scancel": {"*": ""},
    "srun": {"*": "Usage: srun\n      --container-image=[USER@]PATH  [pyxis] the image\n"},
    "id": {"*": "uid=7(ada) gid=7(ada) groups=7(ada)\n"},
    "sacctmgr": {
        "*defaultaccount": "Cluster|User|Def Acct|\n|ada|vision|\n",
        "*qos": "Cluster|User|Account|QOS|\nc|ada|vision|normal,long|\n",
        "*": "Cluster|User|Account|\nc|ada|nlp|\nc|ada|vision|\n",
    },
    "nvidia-smi": {"*": "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"},
    "bash": {"*": "==module|function|==\n"},
    "kubectl": {
        "*/apis": '{"kind": "APIGroupList", "groups": [{"name": "jobset.x-k8s.io"}]}\n',
        "*": '{\n "kind": "List",\n "items": [\n  {"metadata": {"name": "runs"}}\n ]\n}\n',
    },
}
"""What each program prints, by a pattern of its arguments."""

KUBECONFIG = """\
current-context: lab
contexts:
- {name: lab, context: {cluster: c, user: u, namespace: default}}
"""


class Site(NamedTuple):
    """A folder of programs, and one for what is made."""

    programs: Path
    folder: Path

    def write(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def print(self, noise: Callable[[str], str] | None) -> None:
        """Have all programs answer with this noise; with noise alone for None."""
        for name, answers in ANSWERS.items():
            cases = []
            for number, (pattern, answer) in enumerate(answers.items()):
                text = f"{BANNER}{LIKE_DATA}" if noise is None else noise(answer)
                file = self.programs / f"{name}.{number}"
                file.write_bytes(text.encode())
                words = pattern.replace(" ", "' '")
                cases.append(f"{words}) exec cat {file} ;;")
            self.write(name, "\n".join(['case "$*" in', *cases, "esac"]))

    def submitted(self) -> str:
        """Return the URI of a run that is submitted now."""
        profile = toolkit.SlurmProfile(name="s", runs_dir=str(self.folder / "runs"))
        job = toolkit.JobSpec(name="probe", command=("true",))
        return SlurmLauncher(profile).submit(toolkit.plan(job, profile)).uri

    def checked(self) -> list[str]:
        """Return the findings of `check --server` about a job that does not fit."""
        options = {"partition": "cpu", "account": "bio", "kill_wait": "60s"}
        profile = toolkit.SlurmProfile.model_validate(
            {"name": "s", "runs_dir": str(self.folder), **options}
        )
        job = toolkit.JobSpec(name="probe", command=("true",), workdir=str(self.folder / "absent"))
        found = SlurmLauncher(profile).findings(toolkit.plan(job, profile))
        return [str(problem) for problem in found]

    def discovered(self) -> Any:
        config = self.folder / "kubeconfig"
        config.write_text(KUBECONFIG)
        return discover(environ={"KUBECONFIG": str(config)}, root=self.folder, prefix="")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path / "programs", tmp_path / "folder")
    made.programs.mkdir()
    made.folder.mkdir()
    monkeypatch.setenv("PATH", str(made.programs), prepend=os.pathsep)
    monkeypatch.setattr("toolkit.slurm.submission._PAUSES_S", (0.0,) * 3)
    return made


def paths(site: Site) -> list[str]:
    places = [("folder", str(site.folder / name), "x", "make it") for name in ("", "absent")]
    return [str(problem) for problem in path_findings(places, run_command)]


READERS: dict[str, Callable[[Site], Any]] = {
    "the user's jobs": lambda site: ask_mine(run_command),
    "jobs by their ids": lambda site: ask_jobs(run_command, ["7", "8"]),
    "places in the queue": lambda site: ask_places(run_command, {"7", "8", "9"}),
    "the accounting": lambda site: ask_accounting(run_command, ["7"]),
    "the cluster": lambda site: SnapshotCache(run_command).cluster(),
    "the version": lambda site: slurm_version(run_command),
    "account and QOS": lambda site: account_findings(
        {"account": "bio", "qos": "x"}, run_command, place=str
    ),
    "folders": paths,
    "a submission": Site.submitted,
    "the check": Site.checked,
    "the discovery": Site.discovered,
}


OF_JOBS = ("the user's jobs", "jobs by their ids")


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("reader", READERS)
def test_noise_changes_no_answer(site: Site, reader: str, kind: str) -> None:
    read = READERS[reader]
    site.print(NOISE["nothing"])
    clean = read(site)
    assert clean
    if reader in OF_JOBS:
        assert [row.state for row in clean] == [RunState.RUNNING, RunState.PENDING]
    site.print(NOISE[kind])
    noisy = read(site)
    if reader in OF_JOBS and kind == "within":
        # Nobody can tell which of the lines of an argument are warnings.
        noisy = [row._replace(command=clean[n].command) for n, row in enumerate(noisy)]
    assert noisy == clean


REFUSALS = {
    "the user's jobs": "squeue lists no jobs",
    "jobs by their ids": "squeue lists no jobs",
    "places in the queue": "squeue lists no jobs",
    "the accounting": "the accounting does not answer: sacct lists no jobs",
    "a submission": "scontrol gives no answer",
    "the check": "scontrol gives no answer",
}


@pytest.mark.parametrize("noise", [None, lambda text: ""], ids=["noise", "empty"])
@pytest.mark.parametrize("reader", REFUSALS)
def test_noise_alone_is_no_answer(
    site: Site, reader: str, noise: Callable[[str], str] | None
) -> None:
    site.print(noise)
    said = REFUSALS[reader] + (", and prints.*Welcome" if noise is None else "$")
    with pytest.raises(LauncherError, match=rf"^{said}"):
        READERS[reader](site)


@pytest.mark.parametrize("noise", [None, lambda text: ""], ids=["noise", "empty"])
def test_from_noise_alone_nothing_is_known(site: Site, noise: Callable[[str], str] | None) -> None:
    site.print(noise)
    assert READERS["the cluster"](site) == ""
    assert READERS["the version"](site) is None
    assert READERS["account and QOS"](site) == []
    found = site.discovered()
    assert (found.slurm, found.namespace, found.gpus, found.modules) == (None, None, (), False)


@pytest.mark.parametrize("program", ["sinfo", "srun", "id", "sacctmgr", "nvidia-smi", "bash"])
def test_one_program_without_an_answer_hides_those_of_no_other(site: Site, program: str) -> None:
    site.print(NOISE["nothing"])
    site.write(program, f"cat <<'EOF'\n{BANNER}{LIKE_DATA}EOF")
    slurm = site.discovered().slurm
    known = {
        "sinfo": [p.name for p in slurm.partitions] == ["gpu"],
        "srun": slurm.pyxis,
        "id": slurm.accounts == ("vision", "nlp"),
        "sacctmgr": slurm.accounts == ("vision", "nlp"),
        "nvidia-smi": site.discovered().gpus == ("NVIDIA H100",),
        "bash": site.discovered().modules,
    }
    assert slurm.cluster == "c"
    lost = {"id", "sacctmgr"} if program in ("id", "sacctmgr") else {program}
    assert {name for name, is_known in known.items() if not is_known} == lost
    assert (slurm.partitions == ()) == (program == "sinfo")


ERRORS = {
    "squeue": "slurm_load_jobs error: Socket timed out on send/recv operation",
    "sacct": "sacct: error: Problem talking to the database: Connection refused",
}


@pytest.mark.parametrize("program", ERRORS)
def test_the_error_is_found_among_what_modules_print(site: Site, program: str) -> None:
    site.write(
        program, f"echo 'Lmod: cuda/12.8 is loaded' >&2; echo '{ERRORS[program]}' >&2; exit 1"
    )
    cache = SnapshotCache(run_command)
    with pytest.raises(LauncherError, match=ERRORS[program]) as error:
        cache.ended(["7"]) if program == "sacct" else cache.look()
    assert "Lmod" not in str(error.value)
    assert ("the controller is busy" in str(error.value)) == (program == "squeue")


# ---- By ssh

REMOTE = "/bin/bash -s"
BY_SSH = {
    "nothing": REMOTE,
    "before": f"cat $noise; {REMOTE}",
    "after": f"{REMOTE}; cat $noise",  # ~/.bash_logout
    "both": f"cat $noise $noise >&2; cat $noise; {REMOTE}; cat $noise; cat $noise >&2",
    "without a newline": f"printf 'Loading cuda ... '; {REMOTE}; printf bye",
    "colours": f"printf '\\033[1mHi\\033[0m\\n\\033[0m'; {REMOTE}; printf '\\033[H\\033[2J'",
    "CRLF": f"{{ cat $noise; {REMOTE}; cat $noise; }} | sed 's/$/\\r/'",
}


@pytest.fixture
def project(site: Site, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which is the current folder."""
    folder = site.folder / "project"
    folder.mkdir()
    (folder / "train.py").touch()
    own = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    for words in (("init", "-q"), ("add", "."), (*own, "commit", "-qm", "first")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    (folder / "train.py").write_text("changed\n")
    (folder / "new.py").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", BY_SSH)
def test_noise_of_login_shells_changes_no_answer(site: Site, project: Path, kind: str) -> None:
    noise = site.programs / "noise"
    noise.write_text(BANNER + LIKE_DATA)
    site.write("ssh", f'[ "$1" != -G ] || exit 0\nnoise={noise}\n{BY_SSH[kind]}')
    site.write("rsync", "exit 0")
    site.print(NOISE["both"])
    assert [row.job_id for row in ask_mine(SshConnection("there").command)] == ["7", "8"]
    profile = toolkit.SlurmProfile.model_validate(
        {"name": "s", "via": "ssh there", "remote_dir": str(site.folder / "far")}
    )
    job = toolkit.JobSpec(name="probe", command=("true",))
    run = SlurmLauncher(profile).submit(toolkit.plan(job, profile))
    assert run.uri == "slurm://c/7"
    there = run.record.remote_dir
    assert there is not None and Path(there).is_relative_to(site.folder / "far")
    (key,) = {path.name.partition(".")[0] for path in Path(there, "submitted").glob("*-0*")}
    answers = run._login.answers(_folder_of(run), [key, "other-0"])
    assert {key: answers.get(key) for key in (key, "other-0")} == {
        key: "Submitted batch job 7",
        "other-0": None,
    }


@pytest.mark.parametrize("printed", ["", BANNER + LIKE_DATA])
def test_a_login_shell_that_ends_early_is_no_answer(site: Site, printed: str) -> None:
    (site.programs / "noise").write_text(printed)
    site.write("ssh", f"cat {site.programs}/noise")
    with pytest.raises(Lost, match="there is not reached by ssh"):
        ask_mine(SshConnection("there").command)


def test_a_shell_that_prints_into_rsync_is_named(site: Site) -> None:
    real = shutil.which("rsync")
    if real is None:
        pytest.skip("no rsync")
    # As sshd runs a command in a shell whose ~/.bashrc prints.
    run = 'while [ "$1" = -o ]; do shift 2; done; shift; echo "Hello, ada!"; exec sh -c "$*"'
    site.write("ssh", f'[ "$1" != -G ] || exit 0\n{run}')
    with pytest.raises(LauncherError) as error:
        SshConnection("there").rsync("-r", f"{site.programs}/", f"there:{site.folder}/")
    assert not isinstance(error.value, Lost), "another try does not help"
    assert str(error.value).startswith(
        "there prints text in shells that are not interactive ('Hello, ada!'), which breaks rsync"
    )
    assert "`ssh there true` must print nothing" in str(error.value)


# ---- git

BY_GIT = {
    "before": "cat $noise; {}",
    "after": "{}; status=$?; cat $noise; (exit $status)",
    "both": "cat $noise; {}; status=$?; cat $noise; (exit $status)",
}


@pytest.mark.parametrize("kind", BY_GIT)
def test_what_a_wrapper_of_git_prints_is_no_file_and_no_change(
    site: Site, project: Path, kind: str
) -> None:
    real = shutil.which("git")

    def told() -> Any:
        (project / "train.py").write_text("changed\n")
        changed = provenance.collect(project)["git"]
        (project / "train.py").write_text("")
        (project / "new.py").rename(site.folder / "new.py")
        clean = provenance.collect(project)["git"]
        (site.folder / "new.py").rename(project / "new.py")
        assert (changed["dirty"], clean["dirty"]) == (True, False)
        files = working_tree(project)
        return files.root, set(files.names), clean, {**changed, "diff": changed["diff"][:300]}

    before = told()
    assert before[1] == {"train.py", "new.py"}
    noise = site.programs / "noise"
    noise.write_text(BANNER + LIKE_DATA)
    site.write("git", f"noise={noise}\n" + BY_GIT[kind].format(f'{real} "$@"'))
    after = told()
    assert after[:3] == before[:3]
    assert after[3]["diff"].startswith(before[3]["diff"].rstrip("\n"))


# ---- podman


@pytest.mark.parametrize("kind", ["nothing", "before", "after", "both", "CRLF"])
def test_what_a_wrapper_of_podman_prints_is_no_image(site: Site, kind: str) -> None:
    build_image = SimpleNamespace(**runpy.run_path(str(ROOT / "train/build-image")))
    described = '[\n {"Id": "7", "Size": 1, "Config": {"Labels": {}}}\n]\n'
    file = site.programs / "described"
    file.write_bytes(NOISE[kind](described).encode())
    site.write("podman", f"exec cat {file}")
    assert build_image.Engine("podman").look("x") == build_image.Image("7", {}, 1)
    file.write_text(BANNER)
    with pytest.raises(build_image.BuildError, match=r"describes no image: .*Welcome"):
        build_image.Engine("podman").look("x")


# ---- Python


def test_what_the_python_of_a_site_prints_when_it_starts_is_ignored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.folder / "slurm").mkdir()
    (site.folder / "slurm/train.sbatch.j2").write_text("{{ job.name }}\n")
    profile = toolkit.SlurmProfile(name="s", templates_dir=str(site.folder))
    job = toolkit.JobSpec(name="probe", command=("true",))
    wrong = toolkit.JobSpec(name="probe", module="train", args=("--lr", "fast"))

    def told() -> tuple[str, list[str]]:
        problems = train_problems(wrong, here=True)
        return toolkit.render(toolkit.plan(job, profile)), [str(problem) for problem in problems]

    clean = told()
    assert clean[0] == "probe\n" and "--lr" in clean[1][0]
    site.write("python", f'printf "%s" "{BANNER}123\n[]\n"\nexec {sys.executable} "$@"')
    monkeypatch.setattr(sys, "executable", str(site.programs / "python"))
    assert told() == clean


# ---- The environment

HOSTILE = {
    "SQUEUE_FORMAT": "%i", "SQUEUE_FORMAT2": "jobid", "SQUEUE_STATES": "FAILED",
    "SQUEUE_USERS": "root", "SQUEUE_PARTITION": "cpu", "SQUEUE_ALL": "1", "SQUEUE_SORT": "i",
    "SINFO_FORMAT": "%N", "SINFO_PARTITION": "cpu", "SACCT_FORMAT": "JobID",
    "SACCT_FEDERATION": "1", "SCANCEL_STATE": "PENDING", "SCANCEL_INTERACTIVE": "1",
    "SCANCEL_USER": "root", "SCONTROL_ALL": "1", "SCONTROL_FUTURE": "1",
    "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "other", "SLURM_JSON": "pretty",
    "SLURM_YAML": "1", "SLURM_BITSTR_LEN": "1", "SLURM_JOB_ID": "17", "SRUN_DEBUG": "3",
    "SLURM_MEM_PER_CPU": "1", "SBATCH_WAIT": "1", "SBATCH_MEM_PER_CPU": "1",
}  # fmt: skip
KEPT = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "vision", "SBATCH_RESERVATION": "r"}


@pytest.mark.parametrize("by_ssh", [False, True])
def test_no_variable_of_the_caller_reaches_a_command_of_slurm(
    site: Site, project: Path, monkeypatch: pytest.MonkeyPatch, by_ssh: bool
) -> None:
    """On the login node, the variables are those of a profile there."""
    site.print(NOISE["nothing"])
    seen = site.folder / "seen"
    seen.mkdir()
    for path in site.programs.iterdir():
        if not path.suffix:
            script = path.read_text().replace(
                "#!/bin/sh\n", f"#!/bin/sh\nenv >{seen}/{path.name}-$$\n"
            )
            path.write_text(script)
    exports = "; ".join(f"export {k}={shlex.quote(v)}" for k, v in (HOSTILE | KEPT).items())
    site.write("ssh", f'[ "$1" != -G ] || exit 0\n{exports}\n{REMOTE}')
    site.write("rsync", "exit 0")
    where = {"via": "ssh there", "remote_dir": str(site.folder / "far")}
    if not by_ssh:
        where = {"runs_dir": str(site.folder / "runs")}
        for name, value in (HOSTILE | KEPT).items():
            monkeypatch.setenv(name, value)
    profile = toolkit.SlurmProfile.model_validate({"name": "s", "account": "bio", **where})
    job = toolkit.JobSpec(name="probe", command=("true",))
    launcher = SlurmLauncher(profile)
    run = launcher.submit(toolkit.plan(job, profile))
    launcher.findings(toolkit.plan(job, profile))
    snapshots = run._login.snapshots
    snapshots.look()
    snapshots.ended(["7"])
    ask_places(run._login.command, ["7"])
    run._login.command(["scancel", "7"])
    asked = {"squeue", "sacct", "scontrol", "sbatch", "scancel", "id", "sacctmgr"}
    if not by_ssh:
        site.discovered()
        asked |= {"sinfo", "srun"}
    environments = [(path.name, _variables(path)) for path in seen.iterdir()]
    assert {name.rpartition("-")[0] for name, _ in environments} >= asked
    for name, variables in environments:
        program = name.rpartition("-")[0]
        if program == "kubectl":
            continue
        times = variables.pop("SLURM_TIME_FORMAT", None)
        assert times in ((None,) if program in ("sbatch", "scancel") else ("%s", None)), name
        assert times == "%s" or program not in ("squeue", "sacct", "sinfo"), name
        assert {key: variables.get(key) for key in KEPT} == KEPT, name
        assert not variables.keys() & HOSTILE.keys(), name


def _variables(path: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in path.read_text().splitlines())
    return {name: value for name, mark, value in lines if mark}


def _folder_of(run: Any) -> Any:
    return RunFolder(here=run.run_dir, there=run.record.remote_dir, start="")


def test_every_program_is_started_with_an_environment_that_is_named() -> None:
    """A new call of subprocess says which variables the program gets."""
    unnamed = []
    for path in sorted((ROOT / "toolkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func) in ("subprocess.run", "subprocess.Popen")
                and all(keyword.arg != "env" for keyword in node.keywords)
            ):
                unnamed.append(f"{path}:{node.lineno}")
    assert unnamed == []
