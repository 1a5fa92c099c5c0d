"""A batch script: it is short, and keeps its promises without restarts, too."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, Until
from tests.fakes import fake_slurm

ONCE = ("retries.in_job=0", "retries.requeue=0")

STOPPABLE = """#!/bin/sh
trap 'exit %d' TERM
mkdir -p "$TRAIN_RUN_DIR/logs/attempt-0/node-0/7/attempt_0"
touch "$TRAIN_RUN_DIR/ready"
while :; do sleep 0.02; done
"""


def digits(*changes: str) -> str:
    job = toolkit.load(ROOT / "jobs/digits.yaml", changes)
    profile = toolkit.load_profile(str(ROOT / "slurm/profiles/slurm.yaml"))
    return toolkit.render(toolkit.plan(job, profile))


@pytest.mark.parametrize("changes", [(), ONCE], ids=["restarted", "once"])
def test_a_script_is_a_page(changes: tuple[str, ...]) -> None:
    assert len(digits(*changes).splitlines()) <= 80


class Once:
    """A job without restarts, on a node of its own."""

    def __init__(self, folder: Path, **profile: Any) -> None:
        self.run_dir, self.programs = folder / "a run", folder / "bin"
        self.environ = fake_slurm.install(folder, nodes=1) | {
            "SLURMD_NODENAME": "node1",
            "SCRIPT": str(folder / "script.sh"),
        }
        # The step's signals reach all that runs in it.
        self.program(
            "scancel",
            '#!/bin/sh\n[ "$*" = "--signal=TERM 1234.3" ] && kill -TERM "$(cat "$0.pid")"\n',
        )
        job = toolkit.JobSpec(name="probe", module="train")
        text = toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s", **profile)))
        (folder / "script.sh").write_text(text)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def torchrun(self, text: str) -> None:
        pid = f'echo $$ >"{self.programs}/scancel.pid"\n'
        self.program("torchrun", text.replace("\n", f"\n{pid}", 1))

    def start(self, *mode: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", self.environ["SCRIPT"], str(self.run_dir), *mode],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *mode: str) -> int:
        with self.start(*mode) as process:
            return process.wait(60)

    def left(self, attempt: int = 0) -> Mapping[str, str]:
        """Return the texts of the attempt's reason and exit status, as far as they exist."""
        folder = self.run_dir / f"logs/attempt-{attempt}"
        files = [folder / name for name in ("reason", "exit_status")]
        return {file.name: file.read_text().strip() for file in files if file.exists()}


@pytest.fixture
def once(tmp_path: Path) -> Once:
    return Once(tmp_path)


def test_an_attempt_that_ends_well_is_done(once: Once) -> None:
    assert once.run() == 0
    assert once.left() == {"reason": "done: all steps made", "exit_status": "0"}
    assert (once.run_dir / "logs/attempt-0/nodes").read_text() == "node1\n"


SLOW_PYTHON = """#!/bin/sh
touch "$0.begun"
until [ -e "$0.go" ]; do sleep 0.02; done
exec {} "$@"
"""


@pytest.mark.parametrize("epilog", [(), ("true",)], ids=["alone", "epilog"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_does_not_kill_a_supervisor_that_is_starting(
    number: signal.Signals, epilog: tuple[str, ...], tmp_path: Path, until: Until
) -> None:
    """Slurm would see a batch script that was killed, and the run would end for nothing."""
    once = Once(tmp_path, epilog=epilog)
    once.program("python3", SLOW_PYTHON.format(sys.executable))
    with once.start() as process:
        until((once.programs / "python3.begun").exists, "Python starts")
        process.send_signal(number)
        (once.programs / "python3.go").touch()
        process.wait(60)
    assert once.left()["reason"].partition(":")[0] != ""
    assert process.returncode >= 0


NOT_AGAIN = "not queued again (retries.requeue is 0)"


def test_a_failure_keeps_torchruns_status(once: Once) -> None:
    once.torchrun("#!/bin/sh\nexit 7\n")
    assert once.run() == 7
    assert once.left() == {
        "reason": f"retryable: exit status 7; {NOT_AGAIN}",
        "exit_status": "7",
    }


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGUSR1, f"walltime: out of time; {NOT_AGAIN}"),
        (signal.SIGUSR2, "cancelled: by toolkit cancel; not queued again"),
    ],
)
@pytest.mark.parametrize("status", [0, 1])
def test_a_signal_reaches_torchrun_and_is_the_reason(
    once: Once, number: signal.Signals, reason: str, status: int, until: Until
) -> None:
    """Unless all steps were made all the same."""
    once.torchrun(STOPPABLE % status)
    with once.start() as process:
        until(lambda: (once.run_dir / "ready").exists(), "torchrun runs")
        process.send_signal(number)
        assert process.wait(60) == status
    expected = reason if status else "done: all steps made"
    assert once.left() == {"reason": expected, "exit_status": str(status)}
    word = reason.partition(":")[0]
    assert (once.run_dir / "logs/attempt-0/stopping").read_text() == f"{word}\n"


def test_slurm_may_kill_the_script_right_after_its_signal(once: Once, until: Until) -> None:
    once.torchrun(STOPPABLE % 1)
    with once.start() as process:
        until(lambda: (once.run_dir / "ready").exists(), "torchrun runs")
        process.send_signal(signal.SIGTERM)
        until(lambda: "reason" in once.left(), "the reason is there")
        process.kill()
    os.kill(int((once.programs / "scancel.pid").read_text()), signal.SIGTERM)
    assert once.left()["reason"].endswith("; killed soon after")


def test_a_walltime_that_slurm_enforces_stays_one(once: Once, until: Until) -> None:
    once.torchrun(STOPPABLE % 1)
    once.program("scancel", "#!/bin/sh\n")  # the ranks do not hear it
    with once.start() as process:
        until(lambda: (once.run_dir / "ready").exists(), "torchrun runs")
        process.send_signal(signal.SIGUSR1)
        until((once.run_dir / "logs/attempt-0/stopping").exists, "it is told to stop")
        process.send_signal(signal.SIGTERM)
        os.kill(int((once.programs / "scancel.pid").read_text()), signal.SIGTERM)
        assert process.wait(60) == 1
    assert once.left() == {"reason": f"walltime: out of time; {NOT_AGAIN}", "exit_status": "1"}


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_before_torchrun_keeps_it_from_starting(
    once: Once, number: signal.Signals
) -> None:
    once.program(
        "scontrol",
        f"#!/bin/sh\nkill -{int(number)} $PPID\nprintf '%s\\n' begin-nodes node1 end-nodes\n",
    )
    assert once.run() == 1
    assert once.left()["reason"].startswith("cancelled: by ")
    assert not (once.programs.parent / "dumps/0").exists()


def test_a_job_whose_nodes_are_not_known_does_not_start(once: Once) -> None:
    once.program("scontrol", "#!/bin/sh\nexit 1\n")
    assert once.run() == 1
    reason = "fatal: scontrol names no node for 'node[1-1]'"
    assert once.left() == {"reason": reason, "exit_status": "1"}


@pytest.mark.parametrize("line", ["exit 0", "false"])
def test_a_script_that_ends_before_torchrun_has_failed(once: Once, line: str) -> None:
    script = Path(once.environ["SCRIPT"])
    script.write_text(script.read_text().replace("_environment=(\n", f"{line}\n_environment=(\n"))
    assert once.run() == 1
    assert once.left() == {
        "reason": "fatal: ended before torchrun was started",
        "exit_status": "1",
    }


def test_a_signal_during_a_line_of_the_site_is_for_the_supervisor(once: Once) -> None:
    """It comes to what the line has started, too; Slurm calls a job that it ends COMPLETING."""
    script = Path(once.environ["SCRIPT"])
    line = 'sh -c "kill -TERM $$ \\$\\$"'
    script.write_text(script.read_text().replace("_environment=(\n", f"{line}\n_environment=(\n"))
    assert once.run() == 1
    assert once.left()["reason"] == "cancelled: by scancel; not queued again"


def test_it_goes_on_where_it_is_told_to_and_only_there(once: Once) -> None:
    assert once.run() == 0
    assert once.run() == 1
    assert not (once.run_dir / "logs/attempt-1").exists()
    assert once.run("continue") == 0
    assert once.left(1)["reason"] == "done: all steps made"


def test_what_a_container_cannot_do_is_fatal(once: Once, tmp_path: Path) -> None:
    job = toolkit.JobSpec(name="probe", module="train", image="localhost/none:1")
    profile = toolkit.SlurmProfile(name="s", runtime="podman")
    Path(once.environ["SCRIPT"]).write_text(toolkit.render(toolkit.plan(job, profile)))
    once.program("podman", '#!/bin/sh\n[ "$1" != image ]\n')
    assert once.run() == 125
    assert once.left()["reason"] == (
        "fatal: node1: podman has no image localhost/none:1 here, and nowhere to pull it from"
        "; not queued again"
    )


@pytest.mark.parametrize(
    ("node_ends", "reason"),
    [("143", "cancelled: by toolkit cancel; not queued again"), ("0", "done: all steps made")],
)
def test_with_restarts_too_a_stopped_step_that_srun_ends_with_0_is_done_only_if_its_node_is(
    node_ends: str, reason: str, tmp_path: Path, until: Until
) -> None:
    run_dir = tmp_path / "run"
    environ = fake_slurm.install(tmp_path, nodes=1)
    logs = f"'{run_dir}/logs/attempt-0'"
    (tmp_path / "bin/srun").write_text(
        f"#!/bin/sh\ntrap '' TERM USR1\ntouch '{tmp_path}/ready'\n"
        f"mkdir -p {logs}/node-0/7/attempt_0/0\n"  # as torchrun does when it starts ranks
        f"until [ -e {logs}/stopping ]; do sleep 0.1; done\necho {node_ends} >{logs}/ended-0\n"
    )
    job = toolkit.JobSpec.model_validate(
        {"name": "probe", "module": "train", "retries": {"requeue": 2}}
    )
    script = tmp_path / "script.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    with subprocess.Popen(["bash", script, run_dir], env=environ) as process:
        until((tmp_path / "ready").exists, "the step runs")
        process.send_signal(signal.SIGUSR2)
        status = process.wait(300)
    assert (run_dir / "logs/attempt-0/reason").read_text() == f"{reason}\n"
    assert (status == 0) == (node_ends == "0")
