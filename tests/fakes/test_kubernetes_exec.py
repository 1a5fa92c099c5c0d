"""The fake cluster's `pods/exec`, as the official client sees it."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.stream import stream

from tests.conftest import Until
from tests.fakes.kubernetes import FakeKubernetes, Fault

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "shell", "namespace": "default"},
    "spec": {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "main",
                "image": "i:1",
                "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 300 & wait"],
                "env": [{"name": "GREETING", "value": "hello"}],
                "volumeMounts": [{"name": "files", "mountPath": "/files"}],
            }
        ],
        "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": "files"}}],
    },
}


@pytest.fixture
def server(until: Until) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(auto_run=True) as found:
        api: Any = client.CoreV1Api(found.api_client())
        api.create_namespaced_pod("default", POD)
        until(lambda: phase(found) == "Running", "the pod runs")
        yield found


def phase(server: FakeKubernetes, name: str = "shell") -> str:
    return str(server.object("Pod", name)["status"]["phase"])


class Shell:
    """The official client's connection to a server, until the test ends."""

    def __init__(self, server: FakeKubernetes) -> None:
        self.api: Any = client.CoreV1Api(server.api_client())
        self._open: list[Any] = []

    def __call__(self, *argv: str, **more: Any) -> Any:
        """Run a command; return the client's WSClient."""
        known = {"name": "shell", "namespace": "default", "command": list(argv), "stderr": True}
        known |= {"stdin": False, "stdout": True, "tty": False, "_preload_content": False}
        found = stream(self.api.connect_get_namespaced_pod_exec, **(known | more))
        self._open.append(found)
        return found

    def close(self) -> None:
        """Hang up."""
        for one in self._open:
            one.sock.shutdown()  # close() leaves it open after the server's close frame


@pytest.fixture
def execute(server: FakeKubernetes) -> Iterator[Shell]:
    found = Shell(server)
    yield found
    found.close()


def test_a_command_runs_in_the_pods_environment_and_says_how_it_ended(
    server: FakeKubernetes, execute: Shell
) -> None:
    script = 'echo "$GREETING"; echo oh >&2; echo kept > "$0"; exit 7'
    told = execute("/bin/sh", "-c", script, "/files/note")
    told.run_forever(timeout=300)
    assert (told.read_stdout(), told.read_stderr()) == ("hello\n", "oh\n")
    assert told.returncode == 7
    assert (server.root / "claims/files/note").read_text() == "kept\n"


def test_bytes_go_in_and_come_out_as_they_are_and_only_v5_can_end_stdin(execute: Shell) -> None:
    every = bytes(range(256)) * 700
    counted = execute("head", "-c", str(len(every)), stdin=True, binary=True)
    counted.write_stdin(every)
    counted.run_forever(timeout=300)
    assert (counted.returncode, counted.read_all()) == (0, every)
    assert counted.subprotocol == "v5.channel.k8s.io"
    to_the_end = execute("cat", stdin=True, binary=True)
    to_the_end.write_stdin(every)
    to_the_end.close_channel(0)
    to_the_end.run_forever(timeout=300)
    assert (to_the_end.returncode, to_the_end.read_all()) == (0, every)


def test_what_no_container_can_start_is_told_as_the_end_of_the_command(execute: Shell) -> None:
    told = execute("no-such-program")
    told.run_forever(timeout=300)
    assert "no-such-program" in told.read_channel(3)


def test_what_cannot_be_is_refused_as_servers_do(
    server: FakeKubernetes, execute: Shell, until: Until
) -> None:
    for more, status, words in (
        ({"name": "nobody"}, 404, '"reason": "NotFound"'),
        ({"container": "other"}, 400, "container other is not valid for pod shell"),
    ):
        with pytest.raises(client.ApiException) as error:
            execute("true", **more)
        assert f"Handshake status {status}" in str(error.value)
        assert words in str(error.value)
    for verb in ("get", "create"):  # since 1.35 a websocket takes both
        server._forbidden.clear()
        server.forbid("pods/exec", verb)
        with pytest.raises(client.ApiException, match=f"cannot {verb} resource") as error:
            execute("true")
        assert "Handshake status 403" in str(error.value)
    server._forbidden.clear()
    server.kill("shell")
    until(lambda: phase(server) in ("Failed", "Succeeded"), "the pod has ended")
    with pytest.raises(client.ApiException, match="Handshake status 500") as error:
        execute("true")
    assert "container not found" in str(error.value)


def test_a_request_that_is_no_websocket_is_told_so(execute: Shell) -> None:
    with pytest.raises(client.ApiException, match="Upgrade request required") as error:
        execute.api.connect_get_namespaced_pod_exec("shell", "default", command=["true"])
    assert error.value.status == 400


def test_a_connection_breaks_on_demand_and_the_command_sees_its_stdin_end(
    server: FakeKubernetes, execute: Shell, until: Until
) -> None:
    server.faults = [Fault(path=".*/exec", cut=3)]
    told = execute("sh", "-c", 'cat > "$0"', "/files/part", stdin=True, binary=True)
    with pytest.raises(Exception, match=r"(?i)closed|reset|broken|lost"):
        while told.is_open():
            told.write_stdin(b"x" * 1000)
            told.update(timeout=0.01)
    kept = server.root / "claims/files/part"
    until(lambda: kept.exists() and 0 < kept.stat().st_size <= 3000, "the command has ended")


def test_a_pod_that_somebody_makes_runs_and_ends_at_its_deadline(
    server: FakeKubernetes, execute: Shell, until: Until
) -> None:
    late = POD | {"metadata": POD["metadata"] | {"name": "late"}}
    late["spec"] = POD["spec"] | {"activeDeadlineSeconds": 1}
    execute.api.create_namespaced_pod("default", late)
    until(lambda: phase(server, "late") in ("Succeeded", "Failed"), "the pod has ended")
    assert server.object("Pod", "late")["status"]["reason"] == "DeadlineExceeded"
