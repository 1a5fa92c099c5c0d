"""Notifications by `wait`, for runs whose scripts were killed."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.support import short_torchrun
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.support.told_run import ToldRun, run_at
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor import webhook

LOST = RunStatus(state=RunState.FAILED, reason="NODE_FAIL: n1 was lost")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def run_of(folder: Path, notify: dict[str, Any], told: RunStatus = LOST) -> ToldRun:
    (folder / "logs/attempt-0").mkdir(parents=True)
    (folder / "logs/attempt-1").mkdir()
    run = run_at(folder)
    run.record = replace(run.record, profile={"kind": "slurm", "notify": notify})
    run.told = told
    return run


def test_an_end_that_no_script_has_told_is_told_once(tmp_path: Path, receiver: Receiver) -> None:
    run = run_of(tmp_path, {"webhook": receiver.url})
    toolkit.wait([run])
    run.wait()
    ((_, told),) = receiver.posts
    assert told == {
        "event": "end",
        "failed": True,
        "job": "digits",
        "run_dir": str(tmp_path),
        "attempt": 1,
        "text": "digits: attempt 1 ended: NODE_FAIL: n1 was lost",
        "content": "digits: attempt 1 ended: NODE_FAIL: n1 was lost",
    }
    assert json.loads((tmp_path / "logs/attempt-1/notified-end.json").read_text()) == told


def test_what_the_script_has_told_is_not_told_again(tmp_path: Path, receiver: Receiver) -> None:
    run = run_of(tmp_path, {"webhook": receiver.url})
    (tmp_path / "logs/attempt-1/notified-end.json").touch()
    run.wait()
    assert receiver.posts == []


def test_a_run_that_has_succeeded_after_a_restart_says_so(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = run_of(tmp_path, {"webhook": receiver.url}, RunStatus(state=RunState.SUCCEEDED))
    (tmp_path / "logs/attempt-0/reason").write_text("preempted: taken; queued again\n")
    run.wait()
    ((_, told),) = receiver.posts
    assert "attempt 1 ended: succeeded, after 1 restart: preempted: taken at " in told["text"]
    assert told["text"].endswith(" until the next start")


@pytest.mark.parametrize(
    ("on", "state", "told"),
    [
        ("end", RunState.SUCCEEDED, True),
        ("failure", RunState.SUCCEEDED, False),
        ("failure", RunState.CANCELLED, False),
        ("failure", RunState.FAILED, True),
        ("requeue", RunState.FAILED, False),
    ],
)
def test_only_what_was_asked_for_is_told(
    on: str, state: RunState, told: bool, tmp_path: Path, receiver: Receiver
) -> None:
    run_of(tmp_path, {"webhook": receiver.url, "events": [on]}, RunStatus(state=state)).wait()
    assert len(receiver.posts) == told


def test_each_point_of_a_sweep_is_told(tmp_path: Path, receiver: Receiver) -> None:
    sweep = run_of(tmp_path / "sweep", {"webhook": receiver.url})
    sweep.members = [run_of(tmp_path / n, {"webhook": receiver.url}) for n in ("a", "b")]
    toolkit.wait([sweep])
    assert sorted(post["run_dir"] for _, post in receiver.posts) == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]


def test_a_record_that_is_not_ones_own_makes_nobody_tell_anything(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = run_of(tmp_path, {"webhook": receiver.url, "command": f"touch {tmp_path}/pwned"})
    run.record = replace(run.record, believed=False)
    run.wait()
    assert (receiver.posts, (tmp_path / "pwned").exists()) == ([], False)


@pytest.mark.parametrize("notify", [{"webhook": 7}, {"events": "x"}, [], "x"])
def test_a_record_of_another_version_is_passed_over(notify: Any, tmp_path: Path) -> None:
    assert run_of(tmp_path, notify).wait() == LOST


def test_a_receiver_that_fails_is_a_line_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receiver: Receiver
) -> None:
    receiver.answers = [404]
    none = "it has no address that begins with http:// or https://"
    for number, (asked, why) in enumerate(
        [
            ({"webhook": receiver.url}, "127.0.0.1 answers 404"),
            ({"webhook": f"http://127.0.0.1:{free_port()}/s3"}, "127.0.0.1 gives no answer"),
            ({"webhook_file": str(tmp_path / "missing")}, none),
            ({"webhook": "$HOOK_THAT_IS_NOT_SET"}, none),
            ({"command": "exit 3"}, "exit status 3"),
        ]
    ):
        assert run_of(tmp_path / str(number), asked).wait() == LOST
        who = "command" if "command" in asked else "webhook"
        assert capsys.readouterr().err == f"the {who} of 'notify' has failed: {why}\n"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], receiver: Receiver
) -> None:
    with receiving() as other:
        receiver.answers, receiver.location = [status], other.url
        run_of(tmp_path, {"webhook": receiver.url}).wait()
        assert (len(receiver.posts), other.posts, other.others) == (1, [], [])
    assert capsys.readouterr().err == (
        f"the webhook of 'notify' has failed: 127.0.0.1 answers {status}, a redirect, which is "
        "not followed; set the address it redirects to\n"
    )


def test_a_silent_server_is_named_without_the_secret_in_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://user:s3cret@127.0.0.1:{server.getsockname()[1]}/s3cret?token=s3cret"
        run_of(tmp_path, {"webhook": url}).wait()
    said = "the webhook of 'notify' has failed: 127.0.0.1 gives no answer\n"
    assert capsys.readouterr().err == said


def test_a_command_gets_the_event(tmp_path: Path) -> None:
    command = f'cat >{tmp_path}/told; printf %s "$NOTIFY_TEXT" >{tmp_path}/text'
    run_of(tmp_path, {"command": command}).wait()
    text = "digits: attempt 1 ended: NODE_FAIL: n1 was lost"
    assert json.loads((tmp_path / "told").read_text())["text"] == text
    assert (tmp_path / "text").read_text() == text


def test_a_submission_records_who_is_told(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's key counts; the script sends the notification, and `wait` none."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "ends.py"
    script.write_text("")
    job = toolkit.JobSpec.model_validate(
        {
            "name": "probe",
            "script": str(script),
            "notify": {"webhook": receiver.url},
            "env": {"PATH": short_torchrun.installed(tmp_path / "bin")},
        }
    )
    run = toolkit.submit(job, to=toolkit.LocalProfile(name="here"))
    assert run.wait(300).state is RunState.SUCCEEDED
    assert run.record.profile["notify"]["webhook"] == receiver.url
    assert receiver.events == ["end"]
