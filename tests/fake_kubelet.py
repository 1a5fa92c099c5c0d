"""A pod's container as a process of this machine, for `FakeKubernetes(auto_run=True)`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Container", "container_argv", "container_env", "expand"]

REPOSITORY = Path(__file__).parents[1]

_MARK = "FAKE_CONTAINER"
"""A variable by which the processes of a container are found, wherever they went."""


def expand(text: str, values: Mapping[str, str]) -> bytes:
    """Return what Kubernetes makes of a command, argument or variable; byte by byte, as it does.

    After `$`, it takes the next *byte* for a character: `$$` is `$`, and `$é` is garbage.
    """
    source, result, at = text.encode(), b"", 0
    while at < len(source):
        here, rest = source[at : at + 1], source[at + 1 :]
        if here != b"$" or not rest:
            result, at = result + here, at + 1
        elif rest[:1] == b"$":
            result, at = result + b"$", at + 2
        elif rest[:1] == b"(" and b")" in rest:
            name = rest[1 : rest.index(b")")]
            value = values.get(name.decode())
            result += b"$(" + name + b")" if value is None else os.fsencode(value)
            at += len(name) + 3
        else:
            result, at = result + b"$" + chr(rest[0]).encode(), at + 2
    return result


def container_env(
    container: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return a container's environment, each value expanded with those before it.

    Raises:
        KeyError: a secret, or a key of it, that is not there.
    """
    env: dict[str, str] = {}
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["secretKeyRef"]
            if reference["name"] not in secrets:
                raise KeyError(f'secret "{reference["name"]}"')
            if reference["key"] not in secrets[reference["name"]]:
                raise KeyError(f"key {reference['key']} in Secret {reference['name']}")
            env[variable["name"]] = secrets[reference["name"]][reference["key"]]
        else:
            env[variable["name"]] = os.fsdecode(expand(variable.get("value", ""), env))
    return env


def container_argv(container: Mapping[str, Any], env: Mapping[str, str]) -> list[bytes]:
    """Return a container's command and arguments, expanded."""
    words = [*container.get("command", ()), *container.get("args", ())]
    return [expand(word, env) for word in words]


class Container:
    """One start of a pod's container; its first process is what `command` names."""

    def __init__(
        self, pod: Mapping[str, Any], *, root: Path, secrets: Mapping[str, Mapping[str, str]]
    ) -> None:
        container = pod["spec"]["containers"][0]
        env = container_env(container, secrets)
        self._argv = container_argv(container, env)
        for path, folder in _volumes(pod, container, root).items():
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in env.items():
                if value == path or value.startswith(f"{path}/"):
                    env[name] = f"{folder}{value[len(path) :]}"
        self._mark = uuid.uuid4().hex
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOSTNAME": pod["metadata"]["name"],
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
            _MARK: self._mark,
        }
        self._kill_at: float | None = None
        self._signalled = False
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, show: Callable[[str], None]) -> int:
        """Run to the end and return the exit status; what is left then is killed."""
        try:
            with self._lock:
                self._process = process = subprocess.Popen(
                    self._argv,
                    env=self._env,
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
        except OSError as error:
            show(f"exec failed: {error}")
            return 128
        if self._kill_at is not None:
            self._signal()
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=[process.stdout, show])
        reader.start()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.05)
                break
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                process.kill()
        self._kill_rest()
        reader.join()
        process.stdout.close()
        return code if code >= 0 else 128 - code

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to the first process, and SIGKILL to all after the grace period."""
        self._kill_at = time.monotonic() + grace_s
        self._signal()

    def kill(self) -> None:
        """End it now."""
        self._kill_at = time.monotonic()

    def _signal(self) -> None:
        with self._lock:
            if self._process is not None and not self._signalled:
                self._signalled = True
                self._process.send_signal(signal.SIGTERM)

    def _kill_rest(self) -> None:
        """Kill what the first process left, as the end of a PID namespace does."""
        wanted = f"{_MARK}={self._mark}".encode()
        while True:
            found = False
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                        continue
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
                except OSError:
                    continue
            if not found:
                return
            time.sleep(0.01)


def _read(stream: Any, show: Callable[[str], None]) -> None:
    for line in stream:
        show(line.removesuffix("\n"))


def _volumes(pod: Mapping[str, Any], container: Mapping[str, Any], root: Path) -> dict[str, Path]:
    """Return the folders that stand for the paths at which a container sees its volumes."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    found = {}
    for mount in container.get("volumeMounts", ()):
        name, volume = mount["name"], volumes[mount["name"]]
        if mount["mountPath"] in ("/tmp", "/dev/shm"):
            continue
        if "persistentVolumeClaim" in volume:
            found[mount["mountPath"]] = (
                root / "claims" / volume["persistentVolumeClaim"]["claimName"]
            )
        elif "emptyDir" in volume:
            found[mount["mountPath"]] = root / "pods" / pod["metadata"]["uid"] / name
    return found
