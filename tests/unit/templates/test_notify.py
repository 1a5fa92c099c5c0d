"""Notifications by the scripts of a run, to a real server."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, Until
from tests.fakes import fake_slurm
from tests.support import short_torchrun
from tests.support.ending_batch import Job
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.unit.templates.test_entrypoint import AGAIN, DONE, FINAL, Pod
from toolkit.supervisor.notify import Receivers

EVERYTHING = ["end", "failure", "requeue", "stall"]
STALLS = 'mkdir -p "$watchdog"; echo "no step for 8 s: rank 1 hangs" >"$watchdog/stall-1"; '
"""What the watchdog does when it names a stall."""

HOSTILE = '"; touch pwned; $(touch pwned) `touch pwned` \\ \n é'


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def job(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("HOOK", receiver.url)
    return of(tmp_path, EVERYTHING, variable="HOOK", secrets=["HOOK"])


def of(folder: Path, events: Sequence[str] = ("end", "failure"), **receivers: Any) -> Job:
    return Job(folder, receivers=Receivers(events=events, **receivers))


@pytest.mark.parametrize(
    ("outcome", "status", "event", "failed", "text"),
    [
        ("done", 0, "end", False, "attempt 0 ended: done: all steps made"),
        ("fatal", 1, "end", True, 'attempt 0 ended: fatal: rank 1: it "said" so; not queued again'),
        ("retryable", 1, "requeue", True, 'failed: rank 1: it "said" so; queued again'),
        ("preempted", 1, "requeue", False, 'preempted: rank 1: it "said" so; queued again'),
    ],
)
def test_the_end_of_an_attempt_is_told_once(
    job: Job,
    receiver: Receiver,
    outcome: str,
    status: int,
    event: str,
    failed: bool,
    text: str,
) -> None:
    job.told(status=outcome, attempt=0, step=50, rank=1 if status else None, reason='it "said" so')
    for _ in range(2):
        job.conclude(status)
    ((path, told),) = receiver.posts
    assert path == "/hooks/s3cret"
    assert (told["event"], told["failed"], told["attempt"]) == (event, failed, 0)
    assert (told["job"], told["run_dir"]) == ("digits", str(job.run_dir))
    assert told["text"] == told["content"]
    assert told["text"].startswith(f"{job.run_dir.name}: attempt 0 ended: ")
    assert told["text"].endswith(text)


@pytest.mark.parametrize(
    ("on", "outcome", "events"),
    [
        (["end"], "retryable", []),
        (["end"], "fatal", ["end"]),
        (["failure"], "retryable", ["requeue"]),
        (["failure"], "preempted", []),
        (["failure"], "done", []),
        (["requeue"], "preempted", ["requeue"]),
        (["requeue"], "fatal", []),
    ],
)
def test_only_the_events_that_were_asked_for_are_told(
    on: list[str], outcome: str, events: list[str], tmp_path: Path, receiver: Receiver
) -> None:
    job = of(tmp_path, on, webhook=receiver.url)
    job.told(status=outcome, attempt=0, step=5, rank=None, reason="so")
    job.conclude(0 if outcome == "done" else 1)
    assert receiver.events == events


def test_a_receiver_that_is_busy_is_asked_again(job: Job, receiver: Receiver) -> None:
    receiver.answers = [503, 429]
    assert job.conclude(2) == 2
    assert receiver.events == ["end"] * 3
    assert "has failed" not in job.log.read_text()


@pytest.mark.parametrize("answers", [[404], [503] * 3, [0] * 3, None], ids=str)
def test_a_receiver_that_fails_changes_nothing(
    answers: list[int] | None,
    job: Job,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if answers is None:
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{free_port()}/s3cret")
    receiver.answers = list(answers or [])
    assert job.conclude(2) == 2
    assert job.reason == "fatal: exit status 2: another start would end like this one; " + (
        "not queued again"
    )
    assert "digits: the webhook of 'notify' has failed" in job.log.read_text()
    assert "s3cret" not in job.log.read_text()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(
    status: int, job: Job, receiver: Receiver
) -> None:
    with receiving() as other:
        receiver.answers, receiver.location = [status], other.url
        assert job.conclude(2) == 2
        assert (len(receiver.posts), other.posts, other.others) == (1, [], [])
    said = f"127.0.0.1 answers {status}, a redirect, which is not followed; "
    said += "set the address it redirects to"
    assert f"digits: the webhook of 'notify' has failed: {said}\n" in job.log.read_text()
    assert "s3cret" not in job.log.read_text()


def test_a_command_gets_the_event_and_executes_nothing_of_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    command = f'cat >{tmp_path}/told; printf %s "$NOTIFY_TEXT" >{tmp_path}/text; exit 3'
    job = of(tmp_path, command=command)
    job.told(status="fatal", attempt=0, step=5, rank=1, reason=HOSTILE)
    assert job.conclude(1) == 1
    told = json.loads((tmp_path / "told").read_text())
    assert "$(touch pwned)" in told["text"]
    assert "$(touch pwned)" in (tmp_path / "text").read_text()
    assert "digits: the command of 'notify' has failed" in job.log.read_text()
    assert not list(Path.cwd().glob("**/pwned"))[:1]
    assert receiver.posts == []


def test_the_file_with_the_address_is_read_when_it_is_needed(
    tmp_path: Path, receiver: Receiver
) -> None:
    file = tmp_path / "hook of me"
    job = of(tmp_path, webhook_file=str(file))
    assert job.conclude(2) == 2
    assert "the webhook of 'notify' has failed" in job.log.read_text()
    file.write_text(receiver.url + "\n")
    job.attempt = 1
    assert job.conclude(2) == 2
    assert receiver.events == ["end"]


def test_an_attempt_that_was_killed_before_it_could_tell_is_told_by_the_next(
    tmp_path: Path, receiver: Receiver
) -> None:
    job = of(tmp_path, EVERYTHING, webhook=receiver.url)
    job.attempt = 1
    job.had(0, "retryable", step=3)
    (job.folder(0) / "log").write_text("0 /dev/null\n")
    for _ in range(2):
        job.complete_previous()
    ((_, told),) = receiver.posts
    assert (told["event"], told["failed"], told["attempt"]) == ("requeue", True, 0)
    assert told["text"].endswith("attempt 0 ended: failed: so")


NOTICED = "E1128 12:00:{}.5 7 torch/x.py:1] failed (exitcode: {}) local_rank: {} (pid: 9) of x"
"""What torchrun logs when it starts the ranks again."""


def test_a_run_that_has_succeeded_after_restarts_says_so(job: Job, receiver: Receiver) -> None:
    # As torchrun leaves it when node 0 fails first, then node 1, which has repeated its folder.
    for node, restart, at in (("0", 0, 100), ("0", 1, 301), ("1", 0, 200), ("1", 1, 300)):
        folder = job.folder(0) / f"node-{node}/7_x/attempt_{restart}"
        folder.mkdir(parents=True)
        os.utime(folder, (at, at))
    job.conclude(0, printed=NOTICED.format(10, 3, 0) + "\n" + NOTICED.format(20, -9, 1))
    ((_, told),) = receiver.posts
    assert told["text"].endswith(
        "done: all steps made, after 2 restarts, the last: local rank 1: killed by SIGKILL"
    )


def test_a_run_that_has_succeeded_after_attempts_and_restarts_says_so(
    tmp_path: Path, receiver: Receiver
) -> None:
    job = of(tmp_path, webhook=receiver.url)
    job.attempt = 2
    for attempt in range(3):
        (job.folder(attempt) / "node-0/7_x/attempt_0").mkdir(parents=True)
    (job.folder(1) / "node-0/7_x/attempt_1").mkdir()
    job.had(0, "retryable")
    (job.folder(1) / "reason").write_text(f"preempted: rank 0: {HOSTILE}; so; queued again\n")
    job.conclude(0)
    ((_, told),) = receiver.posts
    assert "done: all steps made, after 3 restarts, the last: preempted: rank 0: " in told["text"]
    assert "$(touch pwned) `touch pwned`" in told["text"]
    assert told["text"].endswith("; so")
    assert not (Path.cwd() / "pwned").exists()


def test_an_attempt_that_another_has_taken_over_tells_no_end(job: Job, receiver: Receiver) -> None:
    job.folder(1)
    job.told(status="retryable", attempt=0, step=5, rank=0, reason="so")
    job.conclude(1)
    assert "fenced: attempt 1 has taken over" in job.log.read_text()
    assert receiver.posts == []


def test_a_requeue_that_slurm_refuses_is_the_end_after_all(job: Job, receiver: Receiver) -> None:
    job.cluster.refuses = True
    job.told(status="retryable", attempt=0, step=5, rank=0, reason="so")
    job.conclude(1)
    assert receiver.events == ["end"]
    assert "scontrol could not queue it again" in receiver.posts[-1][1]["text"]


def taken_over(job: Job) -> None:
    job.folder(1)


def test_an_attempt_that_is_superseded_while_it_requeues_tells_no_end(
    job: Job, receiver: Receiver
) -> None:
    """The cable of its node was cut: scontrol does not answer, and Slurm has started the job."""
    job.cluster.away = 9
    job.cluster.hook = lambda command: None if "requeue" not in command else taken_over(job)
    job.told(status="retryable", attempt=0, step=5, rank=0, reason="so")
    job.conclude(1)
    assert (job.run_dir / "logs/attempt-1").exists()
    assert receiver.events == []


def test_a_signal_that_comes_while_it_tells_changes_no_end(tmp_path: Path) -> None:
    job = of(tmp_path, command=f"kill -TERM {os.getpid()}; kill -USR2 {os.getpid()}")
    job.told(status="fatal", attempt=0, step=5, rank=0, reason="so")
    assert job.conclude(3) == 3
    assert job.reason == "fatal: rank 0: so; not queued again"


def test_secrets_are_masked_in_what_is_told(job: Job, receiver: Receiver) -> None:
    reason = f"401 for {receiver.url}: {receiver.url}/x"
    job.told(status="fatal", attempt=0, step=5, rank=0, reason=reason)
    job.conclude(1)
    ((_, told),) = receiver.posts
    assert "401 for ***HOOK***: ***HOOK***/x; " in told["text"]
    assert "s3cret" not in json.dumps(told)


def test_what_keeps_an_attempt_from_starting_is_told(job: Job, receiver: Receiver) -> None:
    with job.batch() as batch:
        assert batch.refuse("no image") == 1
    ((_, told),) = receiver.posts
    assert (told["event"], told["failed"]) == ("end", True)
    assert told["text"].endswith("attempt 0 ended: fatal: no image")


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_without_restarts_tells_its_end(
    status: int, tmp_path: Path, receiver: Receiver
) -> None:
    notify = {"webhook": "$HOOK"}
    job = toolkit.JobSpec.model_validate(
        {"name": "once", "module": "train", "notify": notify, "secrets": ["HOOK"]}
    )
    script = tmp_path / "once.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    environ = fake_slurm.install(tmp_path, nodes=1) | {"HOOK": receiver.url}
    if status:
        (tmp_path / "bin/torchrun").write_text(f"#!/bin/sh\nexit {status}\n")
    argv = ["bash", str(script), str(tmp_path / "run")]
    assert subprocess.run(argv, env=environ, cwd=tmp_path, check=False).returncode == status
    ((_, told),) = receiver.posts
    assert (told["event"], told["failed"]) == ("end", bool(status))
    assert told["text"].startswith("run: attempt 0 ended: ")


def test_each_stall_is_told_once_and_is_no_failure(job: Job, receiver: Receiver) -> None:
    watchdog = job.folder(0) / "watchdog"
    watchdog.mkdir()
    with job.batch() as batch:
        (watchdog / "stall-1").write_text("no step for 8 s: rank 1 hangs\n")
        batch.tell_stalls()
        batch.tell_stalls()
        (watchdog / "stall-2").write_text("no step for 8 s: rank 1 hangs\n")
        batch.conclude(0)
    assert receiver.events == ["stall", "stall", "end"]
    (_, first), *_ = receiver.posts
    assert first["failed"] is False
    assert first["text"].endswith("attempt 0 stalls: no step for 8 s: rank 1 hangs")


def test_stalls_are_told_while_pods_run(tmp_path: Path, receiver: Receiver, until: Until) -> None:
    (pod,) = pods(tmp_path, "JobSet", receiver, "t-0", in_job=1)
    watchdog = "watchdog=$TRAIN_RUN_DIR/logs/attempt-0/watchdog; "
    with pod.start("torchrun", f"{watchdog}{STALLS}wait_for_stop") as process:
        until(lambda: receiver.events == ["stall"], "the stall is told")
        process.terminate()
        process.wait(300)
    assert receiver.events == ["stall"]


def test_a_script_that_starts_its_ranks_once_has_a_watchdog_if_stalls_are_to_be_told() -> None:
    job = toolkit.JobSpec.model_validate({"name": "once", "module": "train"})
    profile = toolkit.SlurmProfile.model_validate(
        {"name": "s", "notify": {"command": "cat", "events": ["stall"]}}
    )
    plan = toolkit.plan(job, profile)
    assert plan.watchdog == "learned"
    never = job.model_copy(update={"stall_timeout_s": 0})
    assert not toolkit.plan(never, profile).watchdog


def test_a_script_without_restarts_that_was_continued_by_hand_says_so(
    tmp_path: Path, receiver: Receiver
) -> None:
    notify, secrets = {"webhook": "$HOOK"}, ["HOOK"]
    job = toolkit.JobSpec(name="once", module="train", notify=notify, secrets=secrets)
    script = tmp_path / "once.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    environ = fake_slurm.install(tmp_path, nodes=1) | {"HOOK": receiver.url}
    earlier = tmp_path / "run/logs/attempt-0"
    earlier.mkdir(parents=True)
    (earlier / "reason").write_text("walltime: out of time\n")
    argv = ["bash", str(script), str(tmp_path / "run"), "continue"]
    assert subprocess.run(argv, env=environ, cwd=tmp_path, check=False).returncode == 0
    ((_, told),) = receiver.posts
    assert told["text"].endswith("done: all steps made, after 1 restart: walltime: out of time")


def test_this_machine_tells_what_a_run_has_succeeded_after(
    tmp_path: Path, receiver: Receiver
) -> None:
    profile = toolkit.LocalProfile.model_validate(
        {"name": "here", "runs_dir": str(tmp_path / "runs"), "notify": {"webhook": receiver.url}}
    )
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), 11)\n"
    )
    job = toolkit.JobSpec(name="probe", script=str(script), retries={"in_job": 1})
    run = toolkit.submit(job, to=profile)
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED
    ((_, told),) = receiver.posts
    assert told["text"].endswith("after 1 restart: local rank 0: killed by SIGSEGV")


SEES = """
import os
from pathlib import Path
seen = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
seen += [str(dict(os.environ)).encode()]
Path(os.environ["TRAIN_RUN_DIR"], "seen").write_bytes(b"".join(seen))
"""


def test_no_command_line_and_no_rank_sees_where_notifications_go(
    tmp_path: Path, receiver: Receiver
) -> None:
    notify = {"webhook": receiver.url, "command": "cat >/dev/null # to-nobody"}
    profile = toolkit.LocalProfile.model_validate(
        {"name": "here", "runs_dir": str(tmp_path / "runs"), "notify": notify}
    )
    (tmp_path / "sees.py").write_text(SEES)
    env = {"PATH": short_torchrun.installed(tmp_path / "bin")}
    job = toolkit.JobSpec(name="probe", script=str(tmp_path / "sees.py"), env=env)
    run = toolkit.submit(job, to=profile)
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED
    assert len(receiver.posts) == 1
    assert run.run_dir is not None
    seen = (run.run_dir / "seen").read_bytes()
    assert b"toolkit.supervisor" in seen
    assert receiver.url.encode() not in seen
    assert b"to-nobody" not in seen


def test_this_machine_tells_each_end(tmp_path: Path, receiver: Receiver) -> None:
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    profile = profile.model_copy(
        update={"notify": toolkit.job.spec.Notify(webhook=receiver.url, events=("end", "requeue"))}
    )
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    env = {"PATH": short_torchrun.installed(tmp_path / "bin")}
    job = toolkit.JobSpec(name="probe", script=str(script), retries={"requeue": 1}, env=env)
    run = toolkit.submit(job, to=profile)
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert receiver.events == ["requeue", "end"]
    first, last = (post["text"] for _, post in receiver.posts)
    assert first.startswith(f"{run.name}: attempt 0 ended: failed: ")
    assert last.startswith(f"{run.name}: attempt 1 ended: failed: ")


SECRETS = {"HOOK": {"secret": "hooks", "key": "url"}}


def pods(folder: Path, kind: str, receiver: Receiver, *names: str, **keys: Any) -> list[Pod]:
    notify = {"webhook": "$HOOK", "events": EVERYTHING}
    made = [
        Pod(folder, kind, name=name, more={"notify": notify, "secrets": SECRETS}, **keys)
        for name in names
    ]
    for pod in made:
        pod.environ["HOOK"] = receiver.url
    return made


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
@pytest.mark.parametrize(
    ("code", "status", "event", "failed"),
    [
        ("exit 0", DONE, "end", False),
        ("say fatal; exit 1", FINAL, "end", True),
    ],
)
def test_of_several_pods_one_tells_the_end(
    kind: str,
    code: str,
    status: int,
    event: str,
    failed: bool,
    tmp_path: Path,
    receiver: Receiver,
) -> None:
    for pod in pods(tmp_path, kind, receiver, "t-0", "t-1"):
        assert pod.run(code) == status
    ((_, told),) = receiver.posts
    assert (told["event"], told["failed"]) == (event, failed)


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_a_pod_that_has_succeeded_tells_that_its_ranks_were_started_again(
    kind: str, tmp_path: Path, receiver: Receiver
) -> None:
    (pod,) = pods(tmp_path, kind, receiver, "t-0", requeue=1)
    own = '"$TRAIN_RUN_DIR/logs/attempt-0/$HOSTNAME"'
    noticed = f"echo '{NOTICED.format(10, -9, 0)}' >>{own}/torchrun.log"
    assert pod.run(f"mkdir -p {own}/7_x/attempt_0; {noticed}; exit 1") == AGAIN
    assert pod.run(f"mkdir -p {own}/8_x/attempt_0") == DONE
    ((_, told),) = receiver.posts
    assert told["text"].endswith(
        "ended: done: all steps made, after 1 restart: local rank 0: killed by SIGKILL"
    )


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_a_pod_that_starts_again_or_is_stopped_tells_nothing(
    kind: str, tmp_path: Path, receiver: Receiver, until: Until
) -> None:
    """Only what ends the run is told."""
    (pod,) = pods(tmp_path, kind, receiver, "t-0", requeue=1)
    assert [pod.run("say retryable; exit 1") for _ in range(2)] == [AGAIN, FINAL]
    assert receiver.events == ["end"]
    (tmp_path / "stopped").mkdir()
    (pod,) = pods(tmp_path / "stopped", kind, receiver, "t-0")
    with pod.start("torchrun", "trap 'exit 1' TERM; wait_for_stop") as process:
        until((pod.runs / "ready").exists, "torchrun runs")
        process.terminate()
        process.wait(300)
    assert receiver.events == ["end"]


def test_who_is_told_by_the_job_counts_before_the_profile() -> None:
    theirs, ours = {"command": "theirs"}, {"command": "ours"}
    job = toolkit.JobSpec.model_validate({"name": "n", "module": "train", "notify": ours})
    profile = toolkit.SlurmProfile.model_validate({"name": "s", "notify": theirs})
    script = toolkit.render(toolkit.plan(job, profile))
    assert ("_notify_command=ours" in script, "_notify_command=theirs" in script) == (True, False)
    plain = toolkit.JobSpec.model_validate({"name": "n", "module": "train"})
    assert "_notify_command=theirs" in toolkit.render(toolkit.plan(plain, profile))
    silent = toolkit.render(toolkit.plan(plain, toolkit.SlurmProfile(name="s")))
    assert "notify" not in silent


def test_the_example_of_the_page_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/monitoring.md").read_text()
    (example,) = re.findall(r"```yaml\n(notify:.*?)```", page, re.DOTALL)
    path = tmp_path / "job.yaml"
    path.write_text(f"name: n\nmodule: train\n{example}")
    notify = toolkit.load(path).notify
    assert notify is not None
    assert notify.events == ("end", "failure")
    (tmp_path / "site.yaml").write_text(f"kind: slurm\n{example}")
    assert toolkit.load_profile(str(tmp_path / "site.yaml")).notify == notify


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        ({}, "give a webhook, webhook_file or command; found none of them"),
        ({"webhook": "https://h", "webhook_file": "~/h"}, "found both"),
        ({"webhook": "hooks.example.com"}, "write https://…, or \\$NAME"),
        ({"command": "a", "events": []}, "notify.events"),
        ({"command": "a", "events": ["crash"]}, "notify.events"),
        ({"command": "a\nb"}, "one line of bash"),
        ({"webhook": "https://hooks.slack.com/services/T0/B0/abcdefghijkl"}, "Slack"),
    ],
)
def test_what_cannot_be_told_is_refused(
    notify: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"name": "n", "module": "train", "notify": notify}))
    with pytest.raises(toolkit.SpecError, match=message):
        toolkit.load(path)
