"""From a laptop: a real sshd, a real cluster, and a machine that sees the files of neither."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TOOLKIT, Cluster, Until
from tests.support.asked_slurm import CONFIG
from tests.support.laptop import ROOT, Laptop, missing

pytestmark = pytest.mark.slurm

LOOP = 'echo begun; trap "exit 75" TERM; while [ ! -e "$GO" ]; do sleep 0.1; done; cat note'


@pytest.fixture(scope="module")
def machine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the tests by ssh: {reason}")
        pytest.skip(reason)
    made = Laptop(cluster, tmp_path_factory.mktemp("far"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def laptop(machine: Laptop) -> Iterator[Laptop]:
    """The laptop, with a project as it was cloned and nothing submitted yet."""
    machine.shell("git reset -q --hard && git clean -fdxq && rm -rf ../state")
    yield machine
    for command in machine.commands.iterdir():
        command.unlink()
    machine.start_sshd()
    machine.cluster.slurm("scancel", "--user=root")


def jobs(laptop: Laptop, *columns: str) -> list[str]:
    """Return what Slurm has of the runs that were submitted from the laptop."""
    shown = laptop.cluster.slurm("squeue", "-h", "-t", "PD,R", "-o", f"%o|{'|'.join(columns)}")
    lines = (line.split("|", 1) for line in shown.splitlines())
    return [rest for command, rest in lines if str(laptop.home) in command]


def code_of(laptop: Laptop, name: str) -> Path:
    return laptop.home / "torch-deploy-toolkit/runs" / name / "code"


def status(laptop: Laptop, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(laptop.toolkit("status", run, "--json"))
    return found


def write_job(laptop: Laptop, name: str, **more: object) -> str:
    job = {"name": name, "resources": {"nnodes": 1}, "stop": {"grace": "20s"}, **more}
    laptop.shell(f"cat >{name}.yaml <<'EOF'\n{json.dumps(job)}\nEOF")
    return f"{name}.yaml"


def test_what_lies_on_the_laptop_trains_on_the_cluster_and_is_followed(laptop: Laptop) -> None:
    laptop.shell(
        "sed -i 's/^def main() -> int:/&\\n    print(\"as edited\")/' train/__main__.py\n"
        "git rm -q jobs/chars.yaml; rm jobs/shuttle.yaml; mkdir data; date >data/big; date >new\n"
        "ln -s new link; mkdir -p sub/deep; date >sub/deep/x; git -C sub init -q"
    )
    assert laptop.shell("grep -c 'as edited' train/__main__.py") == "1\n"
    followed = laptop.run(
        TOOLKIT, "submit", "jobs/digits.yaml", "--to", "away.yaml", "--set", "args.3=1", "-f"
    )
    assert followed.returncode == 0, followed.stdout + followed.stderr
    uri, *lines = followed.stdout.splitlines()
    assert "note: copying the project to login1 (" in followed.stderr
    assert "[rank 0] as edited" in lines
    assert any("test_accuracy" in line for line in lines)
    assert "Welcome" not in followed.stdout + followed.stderr

    found = status(laptop, uri)
    assert found["state"] == "SUCCEEDED"
    metrics = found["metrics"]
    assert isinstance(metrics, dict) and metrics["test_accuracy"] > 0.5
    name = str(found["name"])
    code = code_of(laptop, name)
    sent = {str(p.relative_to(code)) for p in code.rglob("*") if "__pycache__" not in p.parts}
    assert {"jobs/digits.yaml", "new", "link", "sub/deep/x", ".gitignore"} <= sent
    assert not {"jobs/chars.yaml", "jobs/shuttle.yaml", "data", ".git"} & sent
    assert (code / "link").is_symlink()
    # The checkpoints and the code stay there.
    mirror = Path(str(found["run_dir"]))
    here = laptop.shell(f"cd {mirror} && ls").split()
    assert {"job.yaml", "metrics.jsonl", "outcome.json", "logs"} <= set(here)
    assert not {"checkpoints", "code"} & set(here)
    assert found["remote"] == f"login1:{code.parent}"

    # A user on the login node opens the same run, by its directory.
    shown = laptop.on_login_node(f"{TOOLKIT} status {code.parent}")
    assert f"uri:       {uri}\n" in shown
    assert "SUCCEEDED" in shown


@pytest.mark.slow
def test_a_later_submit_changes_nothing_for_an_earlier_run(laptop: Laptop, until: Until) -> None:
    go = laptop.home / "go-on"
    job = write_job(laptop, "loop", command=["bash", "-c", LOOP], env={"GO": str(go)})
    laptop.shell("echo first >note; touch -d @1000000000 note")
    one = laptop.toolkit("submit", job, "--to", "away.yaml").strip()
    until(lambda: "begun" in laptop.toolkit("logs", one), "the first run has begun")
    laptop.shell("echo other >note; touch -d @1000000000 note")  # of the same size and time
    two = laptop.toolkit("submit", job, "--to", "away.yaml").strip()
    names = [str(status(laptop, run)["name"]) for run in (one, two)]
    first, second = (code_of(laptop, name) for name in names)
    # Unchanged files are stored once.
    same, changed = "train/__main__.py", "note"
    assert (first / same).stat().st_ino == (second / same).stat().st_ino
    assert not (first / same).stat().st_mode & 0o222
    assert (first / changed).read_text() == "first\n"

    laptop.toolkit("cancel", one)
    assert laptop.run(TOOLKIT, "wait", one).returncode == 1
    assert status(laptop, one)["state"] == "CANCELLED"
    assert (first.parent / "cancel_requested").exists()
    laptop.shell("echo third >note")
    go.touch()
    assert laptop.toolkit("resubmit", one).strip() == one
    assert not (first.parent / "cancel_requested").exists()
    for run, said in ((one, "first"), (two, "other")):
        laptop.toolkit("wait", run)
        assert f"[rank 0] {said}" in laptop.toolkit("logs", run).splitlines()
    attempts = [laptop.toolkit("logs", one, "--attempt", n) for n in "01"]
    assert ["[rank 0] first" in lines.splitlines() for lines in attempts] == [False, True]
    listed = json.loads(laptop.toolkit("list", "--json"))
    assert [(row["uri"], row["state"]) for row in listed] == [
        (one, "SUCCEEDED"),
        (two, "SUCCEEDED"),
    ]


NOISE = """
echo "*** Welcome: 3 jobs RUNNING ***"; printf '12345\\n\\033[1mbye\\033[0m\\r\\n'
echo "Loading cuda/12.8 ..." >&2
"""


@pytest.fixture
def printing(laptop: Laptop) -> Iterator[None]:
    """Has login shells of the login node print before and after all, and its commands of Slurm."""
    profile, logout = laptop.home / ".bash_profile", laptop.home / ".bash_logout"
    tidy = profile.read_text()
    profile.write_text(f"{NOISE}{tidy}{NOISE}")
    logout.write_text(NOISE)
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        laptop.replace(name, f'#!/bin/bash{NOISE}@REAL@ "$@"\nstatus=$?{NOISE}exit $status\n')
    yield
    profile.write_text(tidy)
    logout.unlink()


def test_a_login_node_whose_shells_print_gives_the_right_answers(
    printing: None, laptop: Laptop, until: Until
) -> None:
    go = laptop.home / "go-loudly"
    loop = ["bash", "-c", LOOP]
    laptop.shell("echo done >note")
    job = write_job(laptop, "loud", command=loop, env={"GO": str(go)}, retries={"requeue": 1})
    uri = laptop.toolkit("submit", job, "--to", "away.yaml").strip()
    (job_id,) = jobs(laptop, "%i")
    assert uri.endswith(f"/{job_id}")
    until(lambda: "[rank 0] begun" in laptop.toolkit("logs", uri), "it has begun")
    assert status(laptop, uri)["state"] == "RUNNING"
    laptop.cluster.slurm("scontrol", "requeue", job_id)
    until(lambda: "begun" in laptop.run(TOOLKIT, "logs", uri, "--attempt", "1").stdout, "again")
    laptop.toolkit("cancel", uri)
    assert laptop.run(TOOLKIT, "wait", uri).returncode == 1
    assert status(laptop, uri)["state"] == "CANCELLED"
    go.touch()
    laptop.toolkit("resubmit", uri)
    laptop.toolkit("wait", uri)
    assert "[rank 0] done" in laptop.toolkit("logs", uri).splitlines()
    assert (
        "KillWait is 5s"
        in laptop.run(TOOLKIT, "check", job, "--to", "away.yaml", "--server").stdout
    )


@pytest.fixture
def cshrc(laptop: Laptop) -> Iterator[Path]:
    """A user whose login shell is a csh, and its file."""
    laptop.stop_sshd()
    laptop.start_sshd(shell=str(shutil.which("tcsh")))
    yield laptop.home / ".cshrc"
    (laptop.home / ".cshrc").unlink()
    laptop.stop_sshd()


def test_a_csh_whose_file_prints_is_named(cshrc: Path, laptop: Laptop) -> None:
    quiet, fix = "if (! $?prompt) exit\n", "or ~/.cshrc with `if (! $?prompt) exit`"
    cshrc.write_text(quiet)
    uri = laptop.toolkit("submit", held(laptop), "--to", "later.yaml").strip()
    assert status(laptop, uri)["state"] == "PENDING"
    cshrc.write_text("echo Hello from cshrc; echo '12345'\n")
    assert str(status(laptop, uri)["reason"]).endswith(fix)
    again = laptop.run(TOOLKIT, "submit", held(laptop), "--to", "later.yaml")
    assert (again.returncode, fix in again.stderr) == (1, True)
    cshrc.write_text(quiet)
    assert [run["uri"] for run in json.loads(laptop.toolkit("list", "--json"))] == [uri]
    laptop.toolkit("cancel", uri)
    assert jobs(laptop, "%i") == []


def test_a_shell_that_prints_into_rsync_is_named_and_nothing_is_left(laptop: Laptop) -> None:
    bashrc = laptop.home / ".bashrc"
    bashrc.write_text("echo Hello from bashrc\n")
    try:
        done = laptop.run(TOOLKIT, "submit", held(laptop), "--to", "later.yaml")
    finally:
        bashrc.unlink()
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("note:"))
    assert said.startswith(
        "login1 prints text in shells that are not interactive ('Hello from bashrc'), which breaks "
        "rsync; `ssh login1 true` must print nothing. Begin ~/.bashrc there with `[[ $- == *i* ]]"
    )
    assert laptop.toolkit("list", "--json") == "[]\n"
    assert jobs(laptop, "%i") == []


@pytest.mark.slow
def test_points_of_a_sweep_are_asked_for_and_cancelled(laptop: Laptop, until: Until) -> None:
    job = write_job(
        laptop,
        "points",
        command=["bash", "-c", LOOP],
        sweep={"grid": {"env.GO": ["note", "never"]}},
    )
    laptop.shell("echo done >note")
    uri = laptop.toolkit("submit", job, "--to", "away.yaml").strip()
    until(lambda: "begun" in laptop.toolkit("logs", f"{uri}_1"), "the second point has begun")
    laptop.toolkit("cancel", f"{uri}_1")
    laptop.run(TOOLKIT, "wait", uri)
    points = status(laptop, uri)["points"]
    assert isinstance(points, list)
    assert [point["state"] for point in points] == ["SUCCEEDED", "CANCELLED"]
    assert "[rank 0] done" in laptop.toolkit("logs", f"{uri}_0").splitlines()


CUT = """#!/bin/bash
[ -e {flag} ] || exec @REAL@ "$@"
[ "$(cat {flag})" != 1 ] || {{ echo 0 >{flag}; exec @REAL@ "$@"; }}
rm {flag}
cut() {{
  local pid=$PPID
  until [ "$(cat "/proc/$pid/comm")" = sshd ]; do
    pid=$(sed -n 's/^PPid:\\t//p' "/proc/$pid/status")
  done
  kill -9 "$pid"
}}
{moment}
"""

MOMENTS = {
    "while sbatch asks": 'cut; sleep 3; exec @REAL@ "$@"',
    "before sbatch asks": "cut; kill -9 $PPID",
    "when sbatch has answered": 'said=$(@REAL@ "$@"); cut; sleep 1; echo "$said"',
    "with all that knew the answer": '@REAL@ "$@" >/dev/null; cut; kill -9 $PPID',
    "when sbatch has refused": 'cut; echo "sbatch: error: not now" >&2; exit 1',
    "never, but sbatch has no answer": '@REAL@ "$@" >/dev/null; echo "sbatch: error: Batch job '
    'submission failed: Socket timed out on send/recv operation" >&2; exit 1',
}


QUICKLY = (
    "import toolkit.slurm.submission as s, toolkit.slurm.login.ssh_host as r\n"
    "s._PAUSES_S = r._PAUSES_S = (0.1,) * 8\n"
    "import toolkit.cli; toolkit.cli.main()"
)


def impatient(laptop: Laptop, *argv: str) -> "subprocess.CompletedProcess[str]":
    """Run the toolkit with pauses that leave no process the time to end by itself."""
    return laptop.run(str(TOOLKIT.parent / "python"), "-c", QUICKLY, *argv)


def held(laptop: Laptop) -> str:
    """Write a profile whose jobs wait, and a job."""
    laptop.shell("printf 'sbatch: {begin: now+1hour}\\n' | cat away.yaml - >later.yaml")
    return write_job(laptop, "held", command=["true"])


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_connection_that_is_cut_makes_no_second_job(laptop: Laptop, moment: str) -> None:
    job, flag = held(laptop), laptop.home / "cut-now"
    laptop.replace("sbatch", CUT.format(flag=flag, moment=MOMENTS[moment]))
    flag.write_text("0")
    done = impatient(laptop, "submit", job, "--to", "later.yaml")
    assert done.returncode == 0, done.stderr
    uri = done.stdout.strip()
    assert not flag.exists(), "nothing was cut"
    assert jobs(laptop, "%i") == [uri.rpartition("/")[2]]
    (row,) = json.loads(laptop.toolkit("list", "--json"))
    assert (row["uri"], row["state"]) == (uri, "PENDING")


def test_an_answer_that_was_written_down_counts_though_slurm_has_forgotten_the_job(
    laptop: Laptop,
) -> None:
    job, flag = held(laptop), laptop.home / "cut-now"
    laptop.replace("sbatch", CUT.format(flag=flag, moment=MOMENTS["when sbatch has answered"]))
    laptop.replace("squeue", "#!/bin/bash\n")
    flag.write_text("0")
    done = impatient(laptop, "submit", job, "--to", "later.yaml")
    assert done.returncode == 0, done.stderr
    assert not flag.exists(), "nothing was cut"
    assert [f"slurm://sandbox/{job_id}\n" for job_id in jobs(laptop, "%i")] == [done.stdout]


@pytest.mark.slow
def test_a_chain_that_is_cut_in_the_middle_is_whole(laptop: Laptop) -> None:
    job, flag = held(laptop), laptop.home / "cut-now"
    moment = MOMENTS["with all that knew the answer"]
    laptop.replace("sbatch", CUT.format(flag=flag, moment=moment))
    flag.write_text("1")  # the second one
    done = impatient(laptop, "submit", job, "--to", "later.yaml", "--chain", "3")
    assert done.returncode == 0, done.stderr
    uri = done.stdout.strip()
    assert not flag.exists(), "nothing was cut"
    first = int(uri.rpartition("/")[2])
    assert sorted(jobs(laptop, "%i", "%E")) == [
        f"{first}|(null)",
        f"{first + 1}|afterany:{first}(unfulfilled)",
        f"{first + 2}|afterany:{first + 1}(unfulfilled)",
    ]
    laptop.toolkit("cancel", uri)
    assert jobs(laptop, "%i") == []


@pytest.mark.slow
def test_a_login_node_that_is_gone_in_the_middle_is_asked_later(laptop: Laptop) -> None:
    job, flag = held(laptop), laptop.home / "cut-now"
    assert laptop.sshd is not None
    down = f'said=$(@REAL@ "$@"); kill -9 {laptop.sshd.pid}; cut; echo "$said"'
    laptop.replace("sbatch", CUT.format(flag=flag, moment=down))
    flag.write_text("0")
    done = impatient(laptop, "submit", job, "--to", "later.yaml")
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("note:"))
    name = said.split()[9].removesuffix(":")
    assert said.startswith(f"it is unknown whether Slurm has the job of {name}: login1 is not ")
    assert f"`toolkit status {name}` finds out" in said
    assert status(laptop, name)["state"] == "UNKNOWN"

    laptop.sshd.wait()
    laptop.start_sshd()
    (job_id,) = jobs(laptop, "%i")
    found = status(laptop, name)
    assert (found["uri"], found["state"]) == (f"slurm://sandbox/{job_id}", "PENDING")
    (row,) = json.loads(laptop.toolkit("list", "--json"))
    assert row["uri"] == found["uri"]
    refused = laptop.run(TOOLKIT, "resubmit", name)
    assert "is PENDING and has not ended" in refused.stderr
    assert len(jobs(laptop, "%i")) == 1


def test_a_host_that_is_not_reached_is_one_message(laptop: Laptop) -> None:
    job = held(laptop)
    uri = laptop.toolkit("submit", job, "--to", "later.yaml").strip()
    laptop.stop_sshd()
    for argv in (["submit", job, "--to", "later.yaml"], ["cancel", uri]):
        done = laptop.run(TOOLKIT, *argv)
        assert done.returncode == 1
        (said,) = (line for line in done.stderr.splitlines() if not line.startswith("note:"))
        assert "login1 is not reached by ssh: connect to host 127.0.0.1 port" in said
        assert "`ssh login1 true` must work without a question" in said
    logs = laptop.run(TOOLKIT, "logs", uri)
    assert (logs.returncode, logs.stdout) == (1, "")
    (row,) = json.loads(laptop.toolkit("list", "--json"))
    assert (row["uri"], row["state"]) == (uri, "UNKNOWN")
    assert "login1 is not reached" in row["reason"]


@pytest.mark.slow
def test_a_secret_of_the_laptop_reaches_the_job_and_nothing_else(
    laptop: Laptop, until: Until
) -> None:
    value = "s3cret'value $(x)\nof two lines"
    show = 'printf %s "$HF_TOKEN" | sha256sum'
    job = write_job(laptop, "secret", command=["bash", "-c", show], secrets=["HF_TOKEN"])
    seen = laptop.home / "seen"
    laptop.replace(
        "sbatch", f'#!/bin/bash\ncat /proc/[0-9]*/cmdline >{seen} 2>/dev/null\nexec @REAL@ "$@"\n'
    )
    refused = laptop.run(TOOLKIT, "submit", job, "--to", "away.yaml")
    assert "secrets are not set here: HF_TOKEN" in refused.stderr
    uri = laptop.toolkit("submit", job, "--to", "away.yaml", HF_TOKEN=value).strip()
    laptop.toolkit("wait", uri)
    digest = hashlib.sha256(value.encode()).hexdigest()
    assert digest in laptop.toolkit("logs", uri)
    assert b"sbatch\0--output=" in seen.read_bytes()
    files = [path for path in laptop.remote.rglob("*") if path.is_file()]
    own = [path.read_bytes() for path in files if ".venv" not in path.parts]
    assert all(b"s3cret" not in content for content in own)
    assert laptop.shell("grep -arl s3cret ../state || :") == ""


def test_check_asks_the_site_by_ssh(laptop: Laptop) -> None:
    done = laptop.run(TOOLKIT, "check", "jobs/digits.yaml", "--to", "away.yaml", "--server")
    assert done.returncode == 1
    (found,) = (line for line in done.stdout.splitlines() if not line.startswith("note:"))
    assert "KillWait is 5s, and profile 'away' says 30s; write kill_wait: 5s" in found


def test_what_does_not_work_is_said_before_anything_is_brought(laptop: Laptop) -> None:
    job = held(laptop)
    nowhere = laptop.folder / "nowhere"
    laptop.shell(f"mkdir {nowhere}; cp held.yaml away.yaml {nowhere}")
    outside = laptop.run(TOOLKIT, "submit", job, "--to", "away.yaml", folder=nowhere)
    assert "not a git repository" in outside.stderr
    assert "`git init` there" in outside.stderr

    laptop.shell("truncate -s 2G huge; truncate -s 3M large")
    big = laptop.run(TOOLKIT, "submit", job, "--to", "away.yaml")
    assert "holds 2 GiB that git does not ignore, more than the 1GiB" in big.stderr
    assert "huge (2 GiB), large (3 MiB)" in big.stderr
    laptop.shell("rm huge large; sed 's/^venv: .*/venv: other/' away.yaml >other.yaml")
    lacks = laptop.run(TOOLKIT, "submit", job, "--to", "other.yaml")
    assert (
        "virtual environment ~/torch-deploy-toolkit/other does not exist; create it once"
        in lacks.stderr
    )
    assert {outside.returncode, big.returncode, lacks.returncode} == {1}
    assert laptop.toolkit("list", "--json") == "[]\n"
    assert jobs(laptop, "%i") == []


FETCH = """
import pathlib, sys
from toolkit.runs.records.registry import RunRecord
from toolkit.slurm.login.mirror import Mirrors
from toolkit.slurm.login.ssh import SshConnection
class Run:
    def __init__(self, folder):
        facts = {"uri": "", "name": "", "job": "", "profile": {}, "created": 0}
        self.record = RunRecord(**facts, remote_dir=folder)
mirrors = Mirrors(SshConnection("login1"), pathlib.Path(sys.argv[1]))
runs = [Run(folder) for folder in sys.argv[2:]]
for run in runs:
    mirrors.watch(run)
mirrors.fetch(0)
"""


def test_the_stacks_of_a_run_far_away_are_shown(laptop: Laptop, until: Until) -> None:
    script = "import time; print('begun', flush=True); time.sleep(3600)"
    command = ["python3", "-c", script]
    file = write_job(laptop, "sleeper", command=command, stall_timeout="1h")
    uri = laptop.toolkit("submit", file, "--to", "away.yaml").split()[0]
    until(lambda: "[rank 0] begun" in laptop.toolkit("logs", uri), "it has begun")
    assert 'File "<string>", line 1, in <module>' in laptop.toolkit("stacks", uri)
    (name,) = (laptop.home / "torch-deploy-toolkit/runs").glob("sleeper-*")
    assert not [*name.glob("logs/attempt-0/watchdog/a*")], "neither question nor answer is left"
    laptop.toolkit("cancel", uri)


def test_a_mirror_takes_what_is_new_and_leaves_what_is_big(laptop: Laptop) -> None:
    there, here = laptop.home / "runs/one", laptop.folder / "mirror"
    for folder in (there / "logs", there / "checkpoints/attempt-0", there / "code"):
        folder.mkdir(parents=True)
    (there / "logs/job.log").write_text("line\n" * (4 << 20))
    (there / "model.pt").write_bytes(bytes(17 << 20))
    for name in ("cancel_requested", "checkpoints/attempt-0/x", "code/x", "outcome.json"):
        (there / name).touch()
    python = str(TOOLKIT.parent / "python")

    def fetch() -> list[str]:
        done = laptop.run(python, "-c", FETCH, here, there, laptop.home / "runs/gone")
        assert done.returncode == 0, done.stderr
        return laptop.shell(f"cd {here}/one && find . -type f | sort").split()

    assert fetch() == ["./cancel_requested", "./logs/job.log", "./outcome.json"]
    (there / "cancel_requested").unlink()
    with (there / "logs/job.log").open("a") as log:
        log.write("the end\n")
    assert fetch() == ["./logs/job.log", "./outcome.json"]
    assert laptop.shell(f"tail -n 1 {here}/one/logs/job.log") == "the end\n"
    size = (there / "logs/job.log").stat().st_size
    assert laptop.shell(f"stat -c %s {here}/one/logs/job.log") == f"{size}\n"


@pytest.mark.slow
def test_a_login_node_decides_nothing_that_leaves_the_laptop(laptop: Laptop) -> None:
    """Another writer of the run directory there: an administrator, the job itself, a group."""
    job = write_job(laptop, "fails", command=["bash", "-c", "exit 3"], secrets=["HF_TOKEN"])
    uri = laptop.toolkit("submit", job, "--to", "away.yaml", HF_TOKEN="a-token").strip()
    laptop.run(TOOLKIT, "wait", uri)
    found = status(laptop, uri)
    there = laptop.home / "torch-deploy-toolkit/runs" / str(found["name"])
    here = str(found["run_dir"])
    laptop.shell(f"echo PRIVATE KEY >id_rsa; sha256sum {here}/job.yaml >before")
    mine = str(laptop.project / "id_rsa")

    text = (there / "job.yaml").read_text()
    (there / "job.yaml").write_text(text.replace("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"))
    (there / "points.jsonl").write_text('{"version": 1, "name": "../x", "settings": {}}\n')
    (there / "launch.json").write_text("{}")
    for name, target in {
        "logs/job.log": mine,
        "jobs.jsonl": mine,
        "cancel_requested": f"{laptop.project}/made",
        "outcome.json": "/dev/zero",
        "logs/attempt-0/reason": "/etc/passwd",
        "metrics.jsonl": "metrics.jsonl",
    }.items():
        (there / name).unlink(missing_ok=True)
        (there / name).symlink_to(target)
    os.mkfifo(there / "running.lock")
    (there / "logs/attempt-0/log").write_text(f"0 {mine}\n")
    (there / "logs/attempt-1").mkdir()
    (there / "logs/attempt-1/log").write_text("0 /etc/passwd\n")

    seen = laptop.home / "seen-environ"
    laptop.replace("sbatch", f'#!/bin/bash\nenv >{seen}\nexec @REAL@ "$@"\n')
    secrets = {"HF_TOKEN": "a-token", "AWS_SECRET_ACCESS_KEY": "of-the-laptop"}
    for argv in (["list"], ["status", uri], ["logs", uri], ["cancel", uri], ["resubmit", uri]):
        done = laptop.run(TOOLKIT, *argv, environ=secrets)
        said = done.stdout + done.stderr
        assert f'File "{ROOT}/toolkit/' not in said, said
        assert "PRIVATE" not in said and "root:" not in said, said
    assert "a-token" in seen.read_text() and "of-the-laptop" not in seen.read_text()
    assert laptop.shell("cat id_rsa; ls made 2>/dev/null || :") == "PRIVATE KEY\n"
    assert "OK" in laptop.shell("sha256sum -c before")
    assert laptop.shell(f"find {here} -type l -o -type p") == ""


@pytest.mark.slow
def test_an_answer_without_an_end_is_ended(laptop: Laptop) -> None:
    limited = (
        "import sys\nfrom toolkit.slurm import commands\nfrom toolkit.__main__ import main\n"
        "commands.ANSWER_S, commands.ANSWER_BYTES = 5.0, 1 << 20\n"
        "sys.argv = ['toolkit', 'list']\nmain()\n"
    )
    laptop.toolkit("submit", held(laptop), "--to", "later.yaml")
    python = TOOLKIT.parent / "python"
    for answer, said in {
        "exec sleep 1000": "gives no answer within 5 s",
        "exec yes": "prints more than 1 MiB",
    }.items():
        laptop.replace("squeue", f"#!/bin/bash\n{answer}\n")
        done = laptop.run(python, "-c", limited)
        assert done.returncode == 0, done.stderr
        assert "UNKNOWN" in done.stdout and said in done.stdout, done.stdout


@pytest.mark.slow
def test_a_submission_without_an_end_is_ended_and_tried_once(laptop: Laptop) -> None:
    limited = (
        "import sys\nfrom toolkit.slurm import commands\nfrom toolkit.__main__ import main\n"
        "commands.ACTION_S = 5.0\n"
        f"sys.argv = ['toolkit', 'submit', {held(laptop)!r}, '--to', 'later.yaml']\nmain()\n"
    )
    calls = laptop.folder / "calls"
    laptop.replace("sbatch", f"#!/bin/bash\necho $$ >>{calls}\nexec sleep 1000\n")
    done = laptop.run(TOOLKIT.parent / "python", "-c", limited)
    (pid,) = calls.read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    assert done.returncode == 1, done.stderr
    assert "gives no answer within 5 s" in done.stderr
    assert "whether Slurm has the job of" in done.stderr


@pytest.mark.parametrize("name", ["../../x", "x\x1b", "x" * 100])
def test_a_cluster_has_a_name_that_can_be_part_of_a_uri(laptop: Laptop, name: str) -> None:
    laptop.replace("scontrol", f"#!/bin/bash\nprintf '%s\\n' {shlex.quote(CONFIG.format(name))}\n")
    done = laptop.run(TOOLKIT, "submit", held(laptop), "--to", "later.yaml")
    assert done.returncode == 1
    assert "Slurm says that its cluster is called" in done.stderr and "\x1b" not in done.stderr
    assert laptop.toolkit("list", "--json") == "[]\n"
