"""Any answer in the API server's place ends in one message, in bounded memory and time."""

import gzip
import json
import random
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.security.fuzzing import fuzz, guarded, mutated
from toolkit.cli.summary import rows_of, summary_lines, summary_of
from toolkit.errors import LauncherError
from toolkit.kubernetes import KubernetesLauncher
from toolkit.kubernetes.client import connection
from toolkit.profile import KubernetesProfile
from toolkit.runs.records.registry import RunRecord

TOKEN = "a-token-of-the-user"
PROFILE = KubernetesProfile(name="k", namespace="default", workload="JobSet")
OBJECT = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
        "name": "run-1",
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "labels": {"torch-deploy-toolkit/run": "run-1", "kueue.x-k8s.io/queue-name": "q"},
        "ownerReferences": [{"uid": "u", "name": "x", "kind": "JobSet"}],
    },
    "spec": {"suspend": False, "replicatedJobs": [{"template": {"spec": {"parallelism": 2}}}]},
    "status": {
        "restarts": 1,
        "phase": "Running",
        "conditions": [{"type": "Failed", "status": "True", "reason": "r", "message": "m"}],
        "replicatedJobsStatus": [{"name": "node", "ready": 1, "failed": 0}],
        "containerStatuses": [
            {
                "name": "node",
                "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "m"}},
                "lastState": {"waiting": {"reason": "CrashLoopBackOff"}},
            }
        ],
    },
    "involvedObject": {"name": "run-1"},
    "type": "Warning",
    "reason": "r",
    "message": "m",
    "lastTimestamp": "2026-01-02T03:04:05Z",
}
LIST = {"metadata": {"resourceVersion": "7"}, "items": [OBJECT]}

Answer = Callable[[str, Callable[[bytes], None]], None]
"""Is given the path, and what writes to the connection."""


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        request = self.rfile.readline().decode().split(" ")
        while self.rfile.readline().strip():
            pass
        with suppress(OSError):  # the client may have closed the connection
            self.server.answer(request[1], self.wfile.write)  # type: ignore[attr-defined]


@contextmanager
def answering(answer: Answer) -> Iterator[KubernetesLauncher]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.answer = answer  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        known = client.Configuration()
        known.host = f"http://127.0.0.1:{server.server_address[1]}"
        known.api_key = {"BearerToken": TOKEN, "authorization": TOKEN}
        try:
            yield KubernetesLauncher(
                PROFILE, api_client=client.ApiClient(known), sleep=lambda _: None
            )
        finally:
            server.shutdown()


def reply(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    told = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return ("\r\n".join(told) + "\r\n\r\n").encode() + body


def record() -> RunRecord:
    said = PROFILE.model_dump(mode="json", by_alias=True)
    return RunRecord(uri="k8s://default/run-1", name="run-1", job="j", profile=said, created=1.0)


def looked_at(launcher: KubernetesLauncher) -> str:
    """Query a run in all ways; return all messages."""
    run, said = launcher.open(record()), []
    asks: tuple[Callable[[], Any], ...] = (
        lambda: "\n".join(summary_lines(summary_of(run))),
        lambda: rows_of([run]),
        lambda: "\n".join(run.logs()),
        run.failure,
        run.cancel,
    )
    for ask in asks:
        try:
            said.append(str(ask()))
        except LauncherError as error:
            said.append(str(error))
    text = "\n".join(said)
    assert TOKEN not in text
    text.encode()
    return text


BODIES = ["{}", "null", "[]", "3", '"x"', '{"items": null}', '{"items": [3]}', '{"items": [{}]}']
BODIES += ['{"metadata": null, "items": []}', "[" * 200_000, "<html>", "", "\xff", '{"kind": 3}']


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:20])
def test_json_of_another_shape_is_told(body: str) -> None:
    with answering(lambda path, write: write(reply(body.encode("latin-1")))) as launcher:
        looked_at(launcher)


@pytest.mark.parametrize(
    "wait", ["-5", "nan", "inf", "x", "1e400", "Wed, 21 Oct 2026 07:28:00 GMT"]
)
def test_an_odd_wish_for_patience_is_none(wait: str) -> None:
    busy = reply(b"{}", f"Retry-After: {wait}", status="429 Too Many Requests")
    with answering(lambda path, write: write(busy)) as launcher:
        assert "cannot answer" in looked_at(launcher)


def endless(write: Callable[[bytes], None], head: str, part: bytes) -> None:
    write(f"HTTP/1.1 200 OK\r\n{head}Connection: close\r\n\r\n".encode())
    while True:
        write(part)


def test_an_answer_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.body_of.__kwdefaults__ is not None
    monkeypatch.setitem(connection.body_of.__kwdefaults__, "limit", 1 << 20)
    with answering(lambda path, write: endless(write, "", b"[" * 65536)) as launcher:
        assert "answers more than 1,048,576 bytes" in looked_at(launcher)
    packed = gzip.compress(b"[" * (64 << 20))
    bomb = reply(packed, "Content-Encoding: gzip")
    with answering(lambda path, write: write(bomb)) as launcher:
        assert "answers more than 1,048,576 bytes" in looked_at(launcher)


def test_an_answer_that_comes_byte_by_byte_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.5)
    pause = threading.Event()

    def drip(path: str, write: Callable[[bytes], None]) -> None:
        write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        while not pause.wait(0.05):
            write(b"1\r\n[\r\n")

    with answering(drip) as launcher:
        assert "has not answered within 0.5 s" in looked_at(launcher)
        pause.set()


@pytest.mark.slow
def test_objects_of_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = [b"{}"]

    def answer(path: str, write: Callable[[bytes], None]) -> None:
        write(reply(body[0]))

    with answering(answer) as launcher:

        def attack(rng: random.Random) -> None:
            # Every list and every object is the same: it has the requested name, and is odd.
            odd = mutated(rng, OBJECT)
            whole = mutated(rng, LIST) if rng.random() < 0.2 else LIST | {"items": [odd, OBJECT]}
            found = odd | whole if isinstance(odd, dict) and isinstance(whole, dict) else odd
            body[0] = json.dumps(found).encode()
            with guarded():
                looked_at(launcher)

        fuzz(attack)
