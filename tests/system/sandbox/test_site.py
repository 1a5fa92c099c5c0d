"""The toolkit's assumptions about Slurm, checked on a real one."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.job.sbatch_options import ALLOWED, DECIDED, FLAGS, VALUED
from toolkit.rendering import sbatch_quote

from .conftest import Sandbox

pytestmark = pytest.mark.slurm

TOOLKIT = Path(sys.executable).parent / "toolkit"
LATER = {
    *("consolidate-segments", "container-id", "extra", "oom-kill-step", "segment"),
    *("spread-segments", "stepmgr", "tres-bind", "tres-per-task"),
}
"""Options that Slurm 22.05 lacks."""


def said(sandbox: Sandbox, option: str, *more: str) -> str:
    done = sandbox.slurm("sbatch", option, *more, check=False)
    return done.stderr


def test_sbatch_knows_every_option_and_takes_a_value_where_we_say(sandbox: Sandbox) -> None:
    old = "unrecognized option" in said(sandbox, "--segment=1", "--usage")
    wrong = []
    for name in sorted((ALLOWED | DECIDED.keys()) - (LATER if old else set())):
        with_value = said(sandbox, f"--{name}=1", "--usage")
        alone = said(sandbox, "--usage", f"--{name}")  # the last word has nothing after it
        takes = "doesn't allow an argument" not in with_value
        needs = "requires an argument" in said(sandbox, f"--{name}")
        if "unrecognized option" in with_value + alone:
            wrong.append(f"{name}: unknown")
        elif name in ALLOWED and (takes, needs) != (name not in FLAGS, name in VALUED):
            wrong.append(f"{name}: takes a value: {takes}, needs one: {needs}")
    assert wrong == []


def check(sandbox: Sandbox, *argv: str) -> subprocess.CompletedProcess[str]:
    path = f"PATH={sandbox.dir / 'bin'}:{os.environ['PATH']}"
    return sandbox.command("env", path, str(TOOLKIT), "check", *argv, check=False)


def test_check_asks_the_site_and_submits_nothing(sandbox: Sandbox) -> None:
    (sandbox.work / "job.yaml").write_text("name: probe\nmodule: train\ntime_limit: 1h\n")
    (sandbox.work / "good.yaml").write_text(
        "kind: slurm\nkill_wait: 5s\ngpus_flag: gres\nexclusive: true\n"
        "switches: {count: 1, max_wait: 5m}\nsbatch: {comment: a100&nvlink, nice: 5}\n"
    )
    (sandbox.work / "bad.yaml").write_text("kind: slurm\npartition: hihg\n")
    argv = ["job.yaml", "--server", "--set=resources.gpus_per_node=1"]
    done = check(sandbox, *argv, "--to=./good.yaml")
    assert (done.returncode, done.stdout) == (
        0,
        "job.yaml: fine for ./good.yaml: 1 x 1 processes\n",
    ), done.stderr
    argv = ["job.yaml", "--server", "--to=./bad.yaml", "--set=sbatch.distribution=plane"]
    done = check(sandbox, *argv)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "scontrol show config: [site-kill-wait] KillWait is 5s, and profile 'bad' says 30s; write "
        "kill_wait: 5s",
        "scontrol show partition: [site-partition] partition 'hihg' does not exist; this "
        "cluster has high, low, main",
        "--distribution: [site-option] this site's sbatch refuses it: Invalid plane size or size "
        "not specified; leave it out, or ask for its version",
    ]
    assert sandbox.slurm("squeue", "-h").stdout == ""


@pytest.mark.parametrize("flag", ["gpus-per-node", "gres", "gpus-per-task"])
def test_every_way_to_ask_for_gpus_reaches_the_workers(sandbox: Sandbox, flag: str) -> None:
    kind = "" if flag == "gpus-per-task" else "gpu_type: h100\n"
    (sandbox.work / "site.yaml").write_text(
        f"kind: slurm\ngpus_flag: {flag}\n{kind}prolog: ['PATH={sandbox.work}:$PATH']\n"
        f"epilog: ['touch {sandbox.work}/epilog-{flag}']\nsbatch: {{comment: it's a & b}}\n"
    )
    (sandbox.work / "torchrun").write_text(
        "#!/bin/sh\necho devices=$CUDA_VISIBLE_DEVICES key=$KEY_A\n"
    )
    (sandbox.work / "torchrun").chmod(0o755)
    (sandbox.work / "key").write_text("correct-horse\n")
    (sandbox.work / "key").chmod(0o600)
    keys = {"KEY_A": {"file": str(sandbox.work / "key")}}
    job = {"name": "probe", "module": "train", "secrets": keys, "resources": {"gpus_per_node": 2}}
    (sandbox.work / "job.yaml").write_text(json.dumps(job))
    done = sandbox.command(str(TOOLKIT), "render", "job.yaml", "--to=./site.yaml")
    assert "correct-horse" not in done.stdout
    number = sandbox.submit(done.stdout)
    found = sandbox.wait_job(number, "COMPLETED", "FAILED")
    output = sandbox.output(number)
    assert found["JobState"] == "COMPLETED", output
    assert "devices=0,1 key=correct-horse" in output
    assert (sandbox.work / f"epilog-{flag}").exists()
    shown = sandbox.slurm("scontrol", "-o", "show", "job", number).stdout
    assert "Comment=it's a & b" in shown


ODD = ("x", "\\", "'", '"', " ", "#", "-", "$(id)", "`", "=")


def test_sbatch_reads_each_value_as_it_was_meant(sandbox: Sandbox) -> None:
    values = [
        *("".join(pair) for pair in itertools.product(ODD, ODD)),
        *(r"DOMAIN\user", r"x\'y' --output=/tmp/stolen --uid=0 #", "\\\\", "'\\''", "a\\ b"),
    ]
    ours = {}
    for value in values:
        script = f"#!/bin/bash\n#SBATCH --hold --comment={sbatch_quote(value)}\ntrue\n"
        (sandbox.work / "odd.sbatch").write_text(script)
        job = sandbox.slurm("sbatch", "--parsable", "odd.sbatch").stdout.strip()
        ours[job] = value
    read, outputs = {}, set()
    for job in ours:
        shown = sandbox.slurm("scontrol", "show", "job", job).stdout
        (read[job],) = re.findall(r"^ +Comment=(.*)$", shown, re.MULTILINE) or [""]
        outputs |= {*re.findall(r"^ +StdOut=(.*)/", shown, re.MULTILINE)}
    sandbox.slurm("scancel", *ours)
    # The displayed value has lost its trailing blanks.
    wanted = {job: value.rstrip() for job, value in ours.items()}
    assert {job: text.rstrip() for job, text in read.items()} == wanted
    assert len(outputs) == 1
