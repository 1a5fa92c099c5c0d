"""What must be installed, and how to get it on Debian and Ubuntu."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .state import SandboxError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SLURM = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "ps": "procps",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
PLUGINS = {
    "auth_munge.so": "slurm-wlm-basic-plugins",
    "accounting_storage_mysql.so": "slurm-wlm-mysql-plugin",
}


def missing(*, accounting: bool) -> list[str]:
    """Packages to install, judged by the files they bring (Slurm may come from elsewhere)."""
    commands = SLURM | (ACCOUNTING if accounting else {})
    found = {package for name, package in commands.items() if not shutil.which(name, path=PATH)}
    for plugin, package in PLUGINS.items():
        needed = accounting or plugin != "accounting_storage_mysql.so"
        if needed and not _plugin_exists(plugin):
            found.add(package)
    return sorted(found)


def _plugin_exists(name: str) -> bool:
    places = ("lib", "lib64", "local/lib")
    patterns = (f"slurm*/{name}", f"*/slurm*/{name}")
    return any(
        next(Path("/usr", place).glob(pattern), None) for place in places for pattern in patterns
    )


def require_root() -> None:
    """Namespaces, devices and daemons under other names need root."""
    if os.geteuid() != 0:
        raise SandboxError("must run as root: it makes network, PID and mount namespaces", status=2)


def install(*, accounting: bool) -> list[str]:
    """Install the missing packages and return them."""
    packages = missing(accounting=accounting)
    if not packages:
        return []
    advice = f"install {' '.join(packages)} (Debian's names), then try again"
    if os.geteuid() != 0:
        raise SandboxError(f"not root, so nothing can be installed: as root, {advice}", status=2)
    if not shutil.which("apt-get", path=PATH):
        raise SandboxError(f"no apt-get here: {advice}", status=2)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    argv = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    first = _run(argv, env)
    if first.returncode:
        # Perhaps only the lists are missing or old.
        _run(["apt-get", "update", "-q"], env)
        second = _run(argv, env)
        if second.returncode:
            tail = "\n".join(second.stdout.splitlines()[-60:])
            raise SandboxError(f"apt-get failed; {advice}\n{tail}", status=2)
    still = missing(accounting=accounting)
    if still:
        raise SandboxError(f"still missing after apt-get: {' '.join(still)}", status=2)
    return packages


def _run(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
