"""A laptop and a login node: a real sshd on loopback, and a mount namespace that sees no cluster.

Neither sees the other's files, though both are on one disk: the laptop has an empty file system
mounted over the login node's folder, and its own project is in a file system that is mounted
nowhere else.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.ports import free_port

if TYPE_CHECKING:
    from tests.conftest import Cluster

ROOT = Path(__file__).parents[2]
TOOLKIT = Path(sys.executable).parent / "toolkit"

_PASSWD = Path("/etc/passwd")

_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
SetEnv HOME={home}
"""

_CLIENT = """\
Host login1
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {keys}/user
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  StrictHostKeyChecking yes
"""

_PROFILE = """\
echo "Welcome to login1, {user}!"
echo "Maintenance on Friday." >&2
export PATH={commands}:{path} SLURM_CONF={conf} SANDBOX_DIR={sandbox}
"""

_NAMESPACE = """\
set -e
mount -t tmpfs none {remote}
mount -t tmpfs none {laptop}
mount --bind {keys}/ssh_config /etc/ssh/ssh_config
echo ready
exec sleep infinity
"""


def missing() -> str | None:
    """Say what a laptop with a login node lacks here."""
    needed = ("sshd", "rsync", "git", "unshare", "tcsh")
    programs = [name for name in needed if shutil.which(name) is None]
    return f"needs {', '.join(programs)}: tests/packages.sh" if programs else None


class Laptop:
    """A machine without Slurm, whose user reaches login1 by ssh and has a project in git."""

    def __init__(self, cluster: "Cluster", folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder / "laptop"
        self.project = self.folder / "project"
        self.remote = folder / "remote"
        self.home = self.remote / "home"
        self.commands = self.remote / "bin"
        self._keys = folder / "keys"
        self._log = folder / "sshd.log"
        for made in (self.folder, self.home, self.commands, self._keys):
            made.mkdir(parents=True)
        self.port = free_port()
        self._write_keys()
        self.sshd: subprocess.Popen[bytes] | None = None
        self.start_sshd()
        self._namespace = self._make_namespace()
        self._make_project()
        self.on_login_node("mkdir -p torch-deploy-toolkit")
        (self.home / "torch-deploy-toolkit/.venv").symlink_to(ROOT / ".venv")

    # ---- The login node

    def _write_keys(self) -> None:
        for name in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name)]
            subprocess.run(argv, check=True)
        host = (self._keys / "host.pub").read_text()
        (self._keys / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host}")
        facts = {"port": self.port, "keys": self._keys, "home": self.home}
        (self._keys / "sshd_config").write_text(_SSHD.format(**facts))
        (self._keys / "ssh_config").write_text(_CLIENT.format(**facts))
        environ = self.cluster.environ
        (self.home / ".bash_profile").write_text(
            _PROFILE.format(
                user="$USER",
                commands=self.commands,
                path=environ["PATH"],
                conf=environ["SLURM_CONF"],
                sandbox=environ["SANDBOX_DIR"],
            )
        )

    def start_sshd(self, shell: str | None = None) -> None:
        """Start it, unless it runs; with another login shell than the user's own."""
        if self.sshd is not None and self.sshd.poll() is None:
            return
        Path("/run/sshd").mkdir(exist_ok=True)
        options = ["-D", "-f", str(self._keys / "sshd_config"), "-E", str(self._log)]
        argv = [str(shutil.which("sshd")), *options]
        if shell is not None:
            passwd = self._keys / "passwd"
            passwd.write_text(re.sub("(?m)^(root:.*:).*$", rf"\1{shell}", _PASSWD.read_text()))
            bound = f'mount --bind {passwd} {_PASSWD} && exec "$@"'
            argv = ["unshare", "--mount", "sh", "-c", bound, "sh", *argv]
        self.sshd = subprocess.Popen(argv, env={"PATH": os.environ["PATH"]})
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.sshd.poll() is None, self._log.read_text()

    def stop_sshd(self) -> None:
        """End sshd and its sessions, as a login node that goes down."""
        if self.sshd is not None:
            for pid in self.sessions():
                os.kill(pid, signal.SIGKILL)
            self.sshd.kill()
            self.sshd.wait()
            self.sshd = None

    def sessions(self) -> list[int]:
        """Return the processes that hold a connection each."""
        assert self.sshd is not None
        path = Path(f"/proc/{self.sshd.pid}/task/{self.sshd.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def replace(self, command: str, text: str) -> None:
        """Put a script before a command of Slurm on the login node."""
        real = shutil.which(command, path=self.cluster.environ["PATH"])
        path = self.commands / command
        path.write_text(text.replace("@REAL@", str(real)))
        path.chmod(0o755)

    def on_login_node(self, command: str) -> str:
        """Run a line of bash as the user in a login shell."""
        done = subprocess.run(
            ["bash", "-lc", command],
            env={"HOME": str(self.home), "USER": "root", "PATH": "/usr/bin:/bin"},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.partition("\n")[2]  # without the welcome

    # ---- The laptop

    def _make_namespace(self) -> "subprocess.Popen[str]":
        script = _NAMESPACE.format(remote=self.remote, laptop=self.folder, keys=self._keys)
        argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]
        made = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        return made

    def _make_project(self) -> None:
        self.shell(
            f"mkdir -p {self.project} home/.ssh\ncd {self.project}\n"
            f"cp -r {ROOT}/train {ROOT}/jobs .\n"
            "printf '*.pyc\\n__pycache__/\\n.venv/\\nruns/\\n/data/\\n' >.gitignore\n"
            "printf 'kind: slurm\\nvia: ssh login1\\nvenv: .venv\\n' >away.yaml\n"
            "git init -q && git add -A\n"
            "git -c user.name=me -c user.email=me@example.org commit -qm all",
            folder=self.folder,
        )

    def run(
        self,
        *argv: str | Path,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the laptop."""
        inside = ["nsenter", f"--mount=/proc/{self._namespace.pid}/ns/mnt"]
        start = ["bash", "-c", 'cd "$0" && exec "$@"', str(folder or self.project)]
        return subprocess.run(
            [*inside, *start, *argv],
            env={
                "HOME": str(self.folder / "home"),
                "PATH": f"{TOOLKIT.parent}:/usr/bin:/bin",
                "XDG_RUNTIME_DIR": str(self.folder / "home"),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def shell(self, script: str, *, folder: Path | None = None) -> str:
        """Run lines of bash on the laptop."""
        done = self.run("bash", "-ec", script, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def toolkit(self, *argv: str, **environ: str) -> str:
        """Run the toolkit on the laptop."""
        done = self.run(TOOLKIT, *argv, environ=environ)
        assert done.returncode == 0, f"toolkit {argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        self.stop_sshd()
        with self._namespace:
            self._namespace.kill()
