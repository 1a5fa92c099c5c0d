"""A pod's container as processes of this machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

__all__ = ["Container", "Hosts", "container_argv", "container_env", "expand"]

REPOSITORY = Path(__file__).parents[3]

_MARK = "FAKE_CONTAINER"
"""A variable by which the processes of a container are found, wherever they went."""

_ADDRESS = re.compile(r"([a-z0-9][-a-z0-9.]*):([0-9]+)")

Configs = Mapping[str, Mapping[str, str]]


def expand(text: str, values: Mapping[str, str]) -> bytes:
    """Return a command, argument or variable as Kubernetes expands it, byte by byte.

    After `$`, Kubernetes takes the next *byte* for a character: `$$` is `$`, and `$é` is garbage.
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
    container: Mapping[str, Any],
    secrets: Configs,
    *,
    configs: Configs | None = None,
    pod: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return a container's environment, each value expanded with those before it.

    Raises:
        KeyError: a Secret or ConfigMap, or a key of it, that is not there.
    """
    env: dict[str, str] = {}
    for variable in container.get("env") or ():
        source = variable.get("valueFrom") or {}
        if "fieldRef" in source:
            env[variable["name"]] = _field(pod or {}, source["fieldRef"]["fieldPath"])
        elif source:
            (kind, reference), *_ = source.items()
            word = {"secretKeyRef": "secret", "configMapKeyRef": "configmap"}[kind]
            there = secrets if word == "secret" else configs or {}
            if reference.get("optional") and reference["key"] not in there.get(
                reference["name"], {}
            ):
                continue
            if reference["name"] not in there:
                raise KeyError(f'{word} "{reference["name"]}"')
            if reference["key"] not in there[reference["name"]]:
                shown = "Secret" if word == "secret" else "ConfigMap"
                raise KeyError(f"key {reference['key']} in {shown} {reference['name']}")
            env[variable["name"]] = there[reference["name"]][reference["key"]]
        else:
            env[variable["name"]] = os.fsdecode(expand(variable.get("value") or "", env))
    return env


def _field(pod: Mapping[str, Any], path: str) -> str:
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    if path in ("status.podIP", "status.hostIP"):
        return "127.0.0.1"
    found: Any = pod
    for key in path.split("."):
        found = found.get(key, "") if isinstance(found, Mapping) else ""
    return str(found)


def container_argv(container: Mapping[str, Any], env: Mapping[str, str]) -> list[bytes]:
    """Return a container's command and arguments, expanded."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return [expand(word, env) for word in words]


class Hosts:
    """The cluster's DNS: all pods live on this machine, each pair of host and port on a port."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._ports: dict[tuple[str, str], int] = {}

    def add(self, pod: Mapping[str, Any]) -> None:
        """Note the names of a pod."""
        spec = pod["spec"]
        name = spec.get("hostname") or pod["metadata"]["name"]
        self._known |= {name, pod["metadata"]["name"]}
        if spec.get("subdomain"):
            self._known.add(f"{name}.{spec['subdomain']}")

    def knows(self, host: str) -> bool:
        """Whether a name is a pod's host name, short or with the cluster's domain."""
        short = host.split(".")
        return host in self._known or ".".join(short[:2]) in self._known

    def port(self, host: str, port: str) -> str:
        """Return the port on this machine that stands for a pod's."""
        if (host, port) not in self._ports:
            self._ports[host, port] = free_port()
        return str(self._ports[host, port])

    def translated(self, text: str) -> str:
        """Return a text with this machine's addresses in place of those of pods."""

        def address(match: re.Match[str]) -> str:
            host, port = match.groups()
            return f"127.0.0.1:{self.port(host, port)}" if self.knows(host) else match[0]

        return "127.0.0.1" if self.knows(text) else _ADDRESS.sub(address, text)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with this machine's addresses; `X_ADDR` goes with `X_PORT`."""
        result = {name: self.translated(value) for name, value in env.items()}
        for name, value in env.items():
            port = f"{name.removesuffix('_ADDR')}_PORT"
            if name.endswith("_ADDR") and self.knows(value) and port in env:
                result[port] = self.port(value, env[port])
        return result


class Container:
    """One start of a pod's container; its first process is `command`."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        *,
        root: Path,
        secrets: Configs,
        configs: Configs,
        hosts: Hosts,
    ) -> None:
        container = pod["spec"]["containers"][0]
        env = container_env(container, secrets, configs=configs, pod=pod)
        argv = container_argv(container, env)
        folders = _volumes(pod, container, root, secrets=secrets, configs=configs)
        self._events = root / "pods" / pod["metadata"]["uid"] / "memory.events"
        self._events.parent.mkdir(parents=True, exist_ok=True)
        self._events.write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")

        def placed(text: str) -> str:
            for path, folder in folders.items():
                if text == path or text.startswith(f"{path}/"):
                    return f"{folder}{text[len(path) :]}"
                if "\n" in text:  # a script
                    text = text.replace(f" {path}/", f" {folder}/")
            return text

        # The option of the supervisor, since the cgroup of a container is a file of the test here.
        if b"--" in argv and any(re.search(rb"^pod$|\.pyz pod ", word) for word in argv[:6]):
            argv.insert(argv.index(b"--"), b"--cgroups=" + os.fsencode(self._events.parent))
        # Paths and addresses of the cluster become those of this machine; scripts (several lines)
        # contain no addresses.
        self._placed = placed
        self._argv = [
            os.fsencode(placed(word if "\n" in word else hosts.translated(word)))
            for word in (os.fsdecode(one) for one in argv)
        ]
        env = {name: placed(value) for name, value in hosts.environment(env).items()}
        self._mark = uuid.uuid4().hex
        self._cwd = Path(placed(container.get("workingDir") or str(REPOSITORY)))
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
            **env,
            "GLOO_SOCKET_IFNAME": "lo",
            _MARK: self._mark,
        }
        self._kill_at: float | None = None
        self._signalled = False
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    @property
    def out_of_memory(self) -> bool:
        """Whether one of its processes was killed for memory."""
        return "oom_kill 0" not in self._events.read_text()

    def run(self, show: Callable[[str], None]) -> int:
        """Run to the end, kill the processes that remain, and return the exit status."""
        try:
            with self._lock:
                self._process = process = subprocess.Popen(
                    self._argv,
                    env=self._env,
                    cwd=self._cwd if self._cwd.is_dir() else REPOSITORY,
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

    def execute(self, argv: Sequence[str], listens: bool) -> "subprocess.Popen[bytes]":
        """Start one more command in it."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self._placed(word) for word in argv],
            env=self._env,
            cwd=self._cwd if self._cwd.is_dir() else REPOSITORY,
            stdin=pipe if listens else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to the first process, and SIGKILL to all after the grace period."""
        self._kill_at = time.monotonic() + grace_s
        self._signal()

    def kill(self) -> None:
        """End it now."""
        self._kill_at = time.monotonic()

    def freeze(self) -> None:
        """Stop all its processes: they answer nobody, as on a node that was cut off."""
        for pid in list(self._processes()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)

    def kill_for_memory(self) -> None:
        """Kill the descendants of the first process's children, as the kernel does for memory."""
        self._events.write_text("low 0\nhigh 0\nmax 1\noom 1\noom_kill 1\n")
        first = self._process.pid if self._process is not None else 0
        for pid in list(self._processes()):
            with contextlib.suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if pid != first and parent != first:
                    os.kill(pid, signal.SIGKILL)

    def _signal(self) -> None:
        with self._lock:
            if self._process is not None and not self._signalled:
                self._signalled = True
                self._process.send_signal(signal.SIGTERM)

    def _kill_rest(self) -> None:
        """Kill the processes that the first process left, as the end of a PID namespace does."""
        while found := list(self._processes()):
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _processes(self) -> Iterator[int]:
        wanted = f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _read(stream: Any, show: Callable[[str], None]) -> None:
    for line in stream:
        show(line.removesuffix("\n"))


def _volumes(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    root: Path,
    *,
    secrets: Configs,
    configs: Configs,
) -> dict[str, Path]:
    """Return the folders that stand for the paths at which a container sees its volumes."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    found: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or ():
        name, volume = mount["name"], volumes[mount["name"]]
        if mount["mountPath"] in ("/tmp", "/dev/shm"):
            continue
        folder = root / "pods" / pod["metadata"]["uid"] / name
        if "persistentVolumeClaim" in volume:
            folder = root / "claims" / volume["persistentVolumeClaim"]["claimName"]
        elif "hostPath" in volume or "nfs" in volume:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        texts: Mapping[str, str] = {}
        if "configMap" in volume:
            texts = configs[volume["configMap"]["name"]]
        elif "secret" in volume:
            texts = secrets[volume["secret"]["secretName"]]
        for key, text in texts.items():
            (folder / key).write_text(text, errors="surrogateescape")
        found[mount["mountPath"].rstrip("/")] = folder / mount.get("subPath", "")
    return found
