"""`toolkit check`: ids, reasons and fixes, exit status, JSON, and what the site adds."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster
from tests.unit.slurm.test_site_check import CONFIG, PARTITIONS, Site
from toolkit.checks import check
from toolkit.lint.check import (
    CLUSTER_RULES,
    JOB_RULES,
    MANIFEST_RULES,
    SCRIPT_RULES,
    SITE_RULES,
    TRAINING_RULES,
)
from toolkit.lint.folders import files_to_check
from toolkit.slurm import SlurmLauncher

JOB = "name: probe\nmodule: train\nimage: r.io/t:1\n"
SLURM, KUBERNETES, LOCAL = "kind: slurm\n", "kind: kubernetes\n", "kind: local\n"
TOKEN = "hf_" + "a1" * 17


def test_every_rule_says_what_it_finds_why_and_what_to_do() -> None:
    files = (*SCRIPT_RULES, *TRAINING_RULES, *JOB_RULES, *MANIFEST_RULES)
    rules = (*files, *SITE_RULES, *CLUSTER_RULES)
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z]+)+", rule.id), rule.id
        assert rule.reason.endswith("."), rule.id
        for text in (rule.finds, rule.reason, rule.fix):
            assert text and "\n" not in text, rule.id


# ---- Rules for job files

CASES: dict[str, tuple[str, str, int | None]] = {
    "gpus-exceed-node": ("resources:\n  gpus_per_node: 8\n", f"{SLURM}node: {{gpus: 4}}\n", 5),
    "workers-exceed-gpus": (
        "resources: {gpus_per_node: 1,\n  nproc_per_node: 2}\n",
        SLURM,
        5,
    ),
    "cpus-exceed-node": ("resources: {cpus_per_node: 9}\n", f"{SLURM}node: {{cpus: 8}}\n", 4),
    "memory-exceeds-node": (
        "resources: {memory: 9GiB}\n",
        f"{SLURM}node: {{memory: 8GiB}}\n",
        4,
    ),
    "shm-exceeds-memory": ("resources: {memory: 1GiB, shm: 1GiB}\n", SLURM, 4),
    "stop-beyond-time-limit": ("stop: {grace: 5m}\ntime_limit: 5m\n", SLURM, 5),
    "stop-beyond-signal": ("stop: {grace: 19h}\n", SLURM, 4),
    "notify-without-secret": ("notify: {webhook: $HOOK}\n", SLURM, 4),
    "notify-without-claim": ("notify: {command: cat}\n", KUBERNETES, 4),
    "notify-without-watchdog": (
        "stall_timeout: never\nnotify: {command: cat, events: [stall]}\n",
        SLURM,
        5,
    ),
    "log-pattern-without-watchdog": (
        "stall_timeout: never\nlog_pattern: step (?P<step>\\d+)\n",
        SLURM,
        5,
    ),
    "variable-in-args": ("module: mine\nargs: [$HOME]\n", LOCAL, 4),
    "variable-in-env": ("env: {HF_HOME: /scratch/$USER/hf}\n", LOCAL, 4),
    "output-outside-run-dir": ("module: mine\nargs: [--ckpt-dir, ckpts]\n", LOCAL, 4),
    "train-arguments": ("args: [--epoch, 3]\n", SLURM, 4),
    "gpus-exceed-machine": ("resources:\n  gpus_per_node: 4000\n", LOCAL, 5),
    "script-missing": ("module: null\nscript: nowhere.py\n", LOCAL, 3),
    "secrets-unset": ("secrets:\n- NOWHERE\n", LOCAL, 4),
    "secret-file-open": ("secrets: {A: {file: /proc/version}}\n", LOCAL, 4),
    "elastic-without-restarts": ("resources:\n  nnodes: {min: 1, max: 2}\n", SLURM, 5),
    "needs-supervisor": ("stall_timeout: 60s\n", f"{SLURM}supervisor: none\n", 4),
    "elastic-gpus-per-task": (
        "resources: {nnodes: {min: 1, max: 2}, gpus_per_node: 1}\nretries: {in_job: 1}\n",
        f"{SLURM}gpus_flag: gpus-per-task\n",
        4,
    ),
    "elastic-workload": (
        "resources: {nnodes: {min: 1, max: 2}}\nretries: {in_job: 1}\n",
        f"{KUBERNETES}workload: JobSet\n",
        4,
    ),
    "elastic-master": (
        "resources: {nnodes: {min: 1, max: 2}}\nretries: {in_job: 1}\n",
        f"{KUBERNETES}master: true\npod_security: baseline\n",
        4,
    ),
    "option-with-its-value": ('module: mine\nargs: ["--lr 0.1"]\n', SLURM, 4),
    "in-job-master": (
        "resources: {nnodes: 2}\nretries: {in_job: 1}\n",
        f"{KUBERNETES}master: true\npod_security: baseline\n",
        5,
    ),
    "master-workload": (
        "kubernetes: {workload: JobSet}\n",
        f"{KUBERNETES}master: true\npod_security: baseline\n",
        4,
    ),
    "preemptions-uncounted": ("retries: {preemptions: 2}\n", KUBERNETES, 4),
    "sweep-elastic": (
        "sweep: {list: [{env.A: a}]}\nresources: {nnodes: {min: 1, max: 2}}\n"
        "retries: {in_job: 1}\n",
        SLURM,
        5,
    ),
    "sweep-max-running": (
        "sweep:\n  list: [{env.A: a}, {env.A: b}]\n  max_running: 1\n",
        KUBERNETES,
        6,
    ),
    "trainjob-cannot-say": ("workdir: /w\n", f"{KUBERNETES}workload: TrainJob\n", 4),
    "variable-overwritten": ("env: {_status: a}\n", KUBERNETES, 4),
    "after-elsewhere": ("after: [probe-1]\n", LOCAL, 4),
    "image-missing": ("image: null\n", f"{SLURM}runtime: podman\n", 1),
    "image-of-another-runtime": ("image: /i.sif\n", f"{SLURM}runtime: podman\n", 3),
    "container-option-taken": ("", f"{SLURM}runtime: podman\ncontainer_options: [-t]\n", None),
    "mount-elsewhere": ("mounts:\n- {source: 'claim:x', target: /x}\n", SLURM, 5),
    "mount-forbidden": ("mounts:\n- {source: /x, target: /x}\n", KUBERNETES, 5),
    "mount-target-taken": ("mounts:\n- {source: 'claim:x', target: /tmp}\n", KUBERNETES, 5),
    "mount-unwritable": (
        "mounts:\n- {source: '/a,b', target: /x}\n",
        f"{SLURM}runtime: podman\n",
        5,
    ),
    "mount-without-container": ("mounts:\n- {source: /x, target: /y}\n", SLURM, 5),
    "secret-not-in-cluster": ("secrets: [TOKEN]\n", KUBERNETES, 4),
    "workers-beyond-machine": ("module: mine\nresources: {nnodes: 100000}\n", LOCAL, 4),
    "secret-overwritten": ("secrets: [_port]\n", SLURM, 4),
}
"""Rule: lines of a job, a profile, and the line of the finding."""


@pytest.mark.parametrize("rule", CASES)
def test_a_job_that_cannot_work_is_told_by_which_rule_and_where(rule: str, tmp_path: Path) -> None:
    lines, profile, line = CASES[rule]
    keys = [row.partition(":")[0] for row in lines.splitlines()]
    kept = [row for row in JOB.splitlines() if row.partition(":")[0] not in keys]
    text = "\n".join([*kept, lines])
    path, site = tmp_path / "job.yaml", tmp_path / "site.yaml"
    path.write_text(text.replace("image: null\n", "").replace("module: null\n", ""))
    site.write_text(profile)
    (found,) = check(path, to=[str(site)])
    assert (found.file, found.rule) == (str(path), rule)
    assert found.line == line
    known = next(known for known in JOB_RULES if known.id == rule)
    assert (found.reason, found.fix) == (known.reason, known.fix)
    assert f"[{rule}] {found.message}" in str(found)


def test_every_rule_for_jobs_is_tried() -> None:
    # A secret in a file is refused when it is read, and what Kubernetes is to call a run is ours.
    job = toolkit.JobSpec(name="probe", module="train", args=("--token", TOKEN))
    with pytest.raises(toolkit.PlanError) as caught:
        toolkit.plan(job, toolkit.LocalProfile(name="l"))
    assert [problem.rule for problem in caught.value.problems] == ["secret-in-job"]
    job = toolkit.JobSpec(name="probe", module="train", image="i")
    with pytest.raises(toolkit.PlanError) as caught:
        toolkit.plan(job, toolkit.KubernetesProfile(name="k"), run_name="a" * 60)
    assert [problem.rule for problem in caught.value.problems] == ["name-too-long"]
    assert {rule.id for rule in JOB_RULES} == {*CASES, "secret-in-job", "name-too-long"}


# ---- Rules about sites

LIMITED = f"{CONFIG}MaxArraySize = 1\nAccountingStorageEnforce = associations,limits,qos\n"
MINE = "nlp|normal,high\nvision|normal\n"
SITES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], Site]]] = {
    "site-kill-wait": ({"kill_wait": "9m"}, {}, Site),
    "site-preempt-mode": (
        {},
        {"retries": {"requeue": 1}},
        lambda: Site(config=CONFIG.replace("REQUEUE", "CANCEL")),
    ),
    "site-cred-expire": (
        {},
        {"retries": {"requeue": 1}},
        lambda: Site(config=f"{CONFIG}AuthInfo = socket=/x,cred_expire=600\n"),
    ),
    "site-array-size": (
        {},
        {"sweep": {"list": [{"env.A": "a"}, {"env.A": "b"}]}},
        lambda: Site(config=LIMITED),
    ),
    "site-version": ({}, {}, lambda: Site(config=CONFIG.replace("22.05.8", "20.02"))),
    "site-partition": ({"partition": "mian"}, {}, Site),
    "site-partition-state": ({"partition": "low"}, {"time_limit": "10m"}, Site),
    "site-time-limit": ({}, {"time_limit": "9d"}, Site),
    "site-nodes": ({}, {"resources": {"nnodes": 3}}, Site),
    "site-option": ({}, {"sbatch": {"segment": 4}}, Site),
    "site-account": (
        {"account": "nobody"},
        {},
        lambda: Site(config=LIMITED, associations=MINE),
    ),
    "site-qos": (
        {"account": "vision", "qos": "high"},
        {},
        lambda: Site(config=LIMITED, associations=MINE),
    ),
    "site-refuses": ({}, {}, lambda: Site(refused="sbatch: error: no such thing\n")),
    "site-path": ({"venv": "/nowhere"}, {}, Site),
}


@pytest.mark.parametrize("rule", SITES)
def test_what_a_site_contradicts_is_told_by_which_rule(rule: str) -> None:
    profile, job, site = SITES[rule]
    made = toolkit.SlurmProfile.model_validate({"name": "s", "kill_wait": "30s", **profile})
    spec = toolkit.JobSpec.model_validate({"name": "probe", "module": "train", **job})
    found = SlurmLauncher(made, command=site()).findings(toolkit.plan(spec, made))
    assert [problem.rule for problem in found] == [rule], found


def test_every_rule_about_sites_is_tried() -> None:
    assert {rule.id for rule in SITE_RULES} == SITES.keys()


def test_accounts_are_believed_where_nobody_keeps_them() -> None:
    made = toolkit.SlurmProfile(name="s", account="any", qos="any")
    plan = toolkit.plan(toolkit.JobSpec(name="probe", module="train"), made)
    without = SlurmLauncher(made, command=Site()).findings(plan)
    unenforced = SlurmLauncher(made, command=Site(associations=MINE)).findings(plan)
    mine = toolkit.SlurmProfile(name="s", account="nlp", qos="high")
    plan = toolkit.plan(toolkit.JobSpec(name="probe", module="train"), mine)
    site = Site(config=LIMITED, associations=MINE)
    assert without == unenforced == SlurmLauncher(mine, command=site).findings(plan) == []


def test_what_sbatch_says_of_a_script_comes_back() -> None:
    made = toolkit.SlurmProfile(name="s")
    plan = toolkit.plan(toolkit.JobSpec(name="probe", module="train"), made)
    said = "sbatch: error: one\nallocation failure: two\nTry --help\n"
    (found,) = SlurmLauncher(made, command=Site(refused=said)).findings(plan)
    assert found.message == "sbatch --test-only refuses it: one; allocation failure: two"
    assert PARTITIONS.count("\n") == 3


# ---- The command


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def call(*argv: str, **more: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [TOOLKIT, "check", *argv],
            env={**os.environ, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done

    return call


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_script_without_faults_is_fine(run: Run) -> None:
    done = run(str(ROOT / "slurm/examples/digits.sbatch"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("digits.sbatch: fine\n")


def test_findings_are_lines_and_status_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.sbatch").write_text("#!/bin/bash\n#SBATCH --nodez=2 -t 5\n")
    done = run("t.sbatch")
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "t.sbatch:2: [directive-unknown] sbatch has no option --nodez; did you mean '--nodes'?\n",
        "",
    )


def test_findings_are_objects_with_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text("#!/bin/bash\n#SBATCH -t 5\nexport MASTER_PORT=29500\n")
    done = run("t.sh", "--json")
    rule = next(rule for rule in SCRIPT_RULES if rule.id == "fixed-port")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (
        1,
        [
            {
                "file": "t.sh",
                "line": 3,
                "rule": "fixed-port",
                "message": "the port 29500 is the same for every job on the node; " + rule.fix,
                "reason": rule.reason,
                "fix": rule.fix,
            }
        ],
        "",
    )
    (tmp_path / "t.sh").write_text("#!/bin/bash\n#SBATCH -t 5\n")
    done = run("t.sh", "--json")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "")


def test_what_cannot_be_read_is_status_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.sbatch").write_text("#!/bin/bash\n#SBATCH -t 1\necho 'a\n")
    message = "this single quote is never closed"
    done = run("t.sbatch")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"t.sbatch:3: {message}\n")
    done = run("t.sbatch", "--json")
    (found,) = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (2, "")
    assert (found["file"], found["line"], found["rule"]) == ("t.sbatch", 3, None)
    (tmp_path / "t.sbatch").write_bytes(b"#!/bin/bash\necho caf\xe9\n")
    done = run("t.sbatch")
    assert (done.returncode, done.stderr) == (2, "t.sbatch: is not UTF-8 text (byte 20)\n")
    done = run("none.sbatch")
    assert (done.returncode, done.stderr) == (
        2,
        "none.sbatch: cannot be read: No such file or directory\n",
    )


def test_what_stands_above_a_syntax_error_is_told_with_it(tmp_path: Path) -> None:
    path = tmp_path / "t.sbatch"
    lines = ["#!/bin/bash", "#SBATCH -t 5 --nodez=2", "export MASTER_PORT=29500"]
    for broken in ("if true; then", "srun bash -c 'if true'", "f() {\necho 'a"):
        path.write_text("\n".join([*lines, broken, "export MASTER_PORT=29501", ""]))
        with pytest.raises(toolkit.InputError) as caught:
            check(path)
        rules = [problem.rule for problem in caught.value.problems]
        assert sorted(map(str, rules)) == ["None", "directive-unknown", "fixed-port"], broken


def test_a_script_takes_what_a_profile_of_its_site_tells(run: Run, tmp_path: Path) -> None:
    script = "#!/bin/bash\n#SBATCH -t 5 -c 4 --environment=torch\nsrun python x.py\n"
    (tmp_path / "t.sbatch").write_text(script)
    (tmp_path / "k.yaml").write_text("kind: kubernetes\n")
    (tmp_path / "s.yaml").write_text(
        'kind: slurm\nslurm_version: "23.02.6"\nplugin_options: [environment]\n'
    )
    done = run("t.sbatch")
    assert "[directive-unknown]" in done.stdout and "plugin_options: [environment]" in done.stdout
    assert "did you mean" not in done.stdout
    done = run("t.sbatch", "--to", "s.yaml")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["[srun-cpus]"]
    done = run("t.sbatch", "--to", "k.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "batch scripts are for one" in done.stderr
    done = run("t.sbatch", "--set", "name=a")
    assert (done.returncode, "--set is for jobs" in done.stderr) == (2, True)


def test_a_site_knows_its_version_and_the_options_of_its_plugins(tmp_path: Path) -> None:
    path = tmp_path / "t.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH -t 5 -c 4 --environment=torch\nsrun python x.py\n")

    def rules(**site: Any) -> list[str | None]:
        return [one.rule for one in check(path, server=True, command=Site(**site))]

    assert rules() == ["srun-cpus"]  # whose sbatch takes the option
    newer = CONFIG.replace("22.05.8", "24.11.5")
    assert rules(config=newer) == []
    assert rules(config=newer, refused="no\n") == ["directive-unknown", "site-refuses"]


# ---- Many files


def test_many_files_are_checked_and_one_status_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.sbatch").write_text("#!/bin/bash\n#SBATCH -t 5\nexport MASTER_PORT=1234\n")
    (tmp_path / "b.sbatch").write_text("#!/bin/bash\n#SBATCH -t 5\n")
    (tmp_path / "c.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: 1st}\n")
    done = run("a.sbatch", "b.sbatch", "c.yaml")
    places = [line.split()[:2] for line in done.stdout.splitlines()]
    expected = [["a.sbatch:3:", "[fixed-port]"], ["c.yaml:3:", "[name-invalid]"]]
    assert (done.returncode, done.stderr) == (1, "") and places[:1] == expected[:1]
    assert expected[1] in places
    done = run("a.sbatch", "c.yaml", "--json")
    assert {one["file"] for one in json.loads(done.stdout)} == {"a.sbatch", "c.yaml"}
    done = run("b.sbatch", "b.sbatch", "b.sbatch")
    assert (done.returncode, done.stdout) == (0, "1 file: fine\n")
    done = run("a.sbatch", "none.sbatch")
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert "none.sbatch: cannot be read" in done.stderr


def test_of_a_folder_the_files_for_it_are_taken(run: Run, tmp_path: Path) -> None:
    texts = {
        "a.sbatch": "#!/bin/bash\n#SBATCH -t 5\n",
        "jobs/run.sh": "#!/bin/bash\n#SBATCH -t 5\nexport MASTER_PORT=1234\n",
        "jobs/helper.sh": "export MASTER_PORT=1234\n",
        "jobs/start": "#!/bin/bash\n#SBATCH --nodez=1 -t 5\n",
        "jobs/job.yaml": JOB,
        "jobs/config.yaml": "learning_rate: 0.1\n",
        "k8s/service.yaml": "apiVersion: v1\nkind: Service\nmetadata: {name: 1st}\nspec: {}\n",
        "src/train.py": "import torch\nfrom torch import nn\nmodel = nn.DataParallel(nn.ReLU())\n",
        "src/plot.py": "import matplotlib\n",
        ".git/hook.sbatch": "broken '",
        "env/pyvenv.cfg": "",
        "env/x.sbatch": "broken '",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "jobs/pipe.sbatch")  # nobody would ever write into it
    taken = [str(path.relative_to(tmp_path)) for path in files_to_check(tmp_path)]
    meant = ["a.sbatch", "jobs/job.yaml", "jobs/run.sh", "jobs/start", "k8s/service.yaml"]
    assert taken == [*meant, "src/train.py"]
    done = run(".")
    assert (done.returncode, done.stderr) == (1, "")
    files = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert files == {"jobs/run.sh", "jobs/start", "k8s/service.yaml", "src/train.py"}
    assert len(check(tmp_path)) == len(done.stdout.splitlines())
    (tmp_path / "jobs/bad.job").write_text("echo 'a\n")
    assert run(".").returncode == 2
    assert None in [one.rule for one in check(tmp_path)]
    (tmp_path / "empty").mkdir()
    done = run("empty", "a.sbatch")
    assert (done.returncode, done.stderr) == (
        2,
        "empty: no file here is a script, a job or a manifest\n",
    )


def test_a_secret_is_found_and_not_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.sbatch").write_text(f"#!/bin/bash\n#SBATCH -t 5\nexport T={TOKEN}\n")
    for argv in (["t.sbatch"], ["t.sbatch", "--json"]):
        done = run(*argv)
        assert done.returncode == 1
        assert "secret-literal" in done.stdout
        assert TOKEN[:8] not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
@pytest.mark.parametrize("kind", ["script", "job", "manifest"])
def test_what_a_pipe_says_is_checked_as_a_file_is(kind: str, name: str, tmp_path: Path) -> None:
    path, fine = {
        "script": ("slurm/examples/digits.sbatch", "fine"),
        "job": ("jobs/digits.yaml", "fine: 2 x 1 processes"),
        "manifest": ("k8s/examples/digits.yaml", "fine"),
    }[kind]
    done = subprocess.run(
        ["bash", "-c", f"cat {ROOT / path} | {TOOLKIT} check {name}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}: {fine}\n", "")


def test_a_job_is_held_to_the_longer_names_of_its_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text(f"name: {'n' * 32}\nmodule: train\nimage: i:1\n")
    (tmp_path / "k.yaml").write_text("kind: kubernetes\nworkload: JobSet\n")
    done = run("j.yaml", "--to", "k.yaml")
    assert done.returncode == 1
    assert "[name-too-long]" in done.stdout and "-node-0-0-xxxxx' has 64" in done.stdout


def test_a_file_is_a_script_by_its_name_or_by_what_it_holds(run: Run, tmp_path: Path) -> None:
    for name, text in {
        "a.slurm": "name: x\n",
        "a.job": "echo\n",
        "plain": "#!/bin/sh\n",
        "with.yaml": "#SBATCH --time=5\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert "[shebang-missing]" in run(name).stdout or name == "plain"
        assert "unknown key" not in run(name).stderr
    (tmp_path / "job.yaml").write_text(JOB)
    assert run("job.yaml").stdout == "job.yaml: fine: 1 x 1 processes\n"


@pytest.mark.slurm
def test_a_site_says_what_it_thinks_of_a_script_and_runs_nothing(
    run: Run, cluster: Cluster, tmp_path: Path
) -> None:
    before = cluster.slurm("squeue", "-h", "-o", "%A")
    script = tmp_path / "t.sbatch"
    text = (ROOT / "tests/data/scripts/careful.sbatch").read_text()
    script.write_text(text)
    done = run("t.sbatch", "--server", **cluster.environ)
    assert (done.returncode, done.stdout) == (0, "t.sbatch: fine\n"), done.stderr
    script.write_text(
        text.replace("--output=", "--chdir=/nowhere --output=logs/")
        .replace("--nodes=2 ", "--nodes=99 ")
        .replace("--nnodes=2", "--nnodes=99")
    )
    done = run("t.sbatch", "--server", **cluster.environ)
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [
            "t.sbatch: [site-refuses] sbatch --test-only refuses it: allocation failure: "
            "Requested node configuration is not available",
            "t.sbatch:11: [site-path] logs: there is no such folder; make it: Slurm does not, and "
            "the job fails without a log",
            "t.sbatch:11: [site-path] /nowhere: there is no such folder; make it, or correct "
            "--chdir",
        ],
    ), done.stderr
    assert cluster.slurm("squeue", "-h", "-o", "%A") == before


def test_overrides_may_come_from_a_generator(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nmodule: m\n")
    site = toolkit.LocalProfile(name="here", node={"gpus": 1})
    overrides = ["resources.gpus_per_node=2", "resources.nproc_per_node=2"]
    findings = check(path, iter(overrides), to=[site])
    assert findings == check(path, overrides, to=[site])
    assert [found.file for found in findings] == ["--set resources.gpus_per_node=2"]
