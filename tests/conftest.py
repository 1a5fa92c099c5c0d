"""What all tests share: a user of their own, and the real Slurm cluster."""

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.once import made_once
from tests.support.order import mixed
from tests.support.slurm_site import Site

# No test asserts a time: a loaded machine is slow, not broken. The gate tries the same values each
# time, so that it judges the change; `make test-all` searches on with others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("search"), derandomize=True)
settings.load_profile("gate")

# Rendered scripts call python3. That of a version manager looks for another one each time it is
# called, for 0.1 s of CPU time.
os.environ["PATH"] = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"

# What a shell has started in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
TOOLKIT = Path(sys.executable).parent / "toolkit"
WAITING = ROOT / "tests/system"
SANDBOX = ROOT / "slurm" / "sandbox" / "sandbox"
PATIENCE_S = 300
"""How long a test waits for something that must happen; these machines may be busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix tests that wait with those that compute, where several processes share them."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[WAITING in item.path.parents].append(item)
        items[:] = mixed(parts[True], parts[False], processes, lambda item: item.path)


def pytest_collection_finish() -> None:
    """Leave out of each later search for garbage what is there to stay: a million objects."""
    gc.collect()
    gc.freeze()


def asks(*argv: str) -> bool:
    """Whether a command of Slurm changes nothing, so that it may be repeated."""
    return argv[0] in ("squeue", "sinfo", "sacct") or (argv[0] == "scontrol" and "show" in argv)


def be_a_user(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Keep the tests' runs and profiles out of the user's, and the user's out of the tests."""
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return folder


@pytest.fixture(scope="session", autouse=True)
def user_of_clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Who a fixture of the whole session is, also when it starts a command."""
    with pytest.MonkeyPatch.context() as patch:
        be_a_user(tmp_path_factory.mktemp("user"), patch)
        yield


@pytest.fixture(autouse=True)
def own_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Who a test is."""
    return be_a_user(tmp_path_factory.mktemp("user"), monkeypatch)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""

    def build(folder: Path) -> None:
        argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run(argv, check=True, capture_output=True)

    return made_once(tmp_path_factory, "dist", build)


Until = Callable[..., None]


@pytest.fixture
def until() -> Until:
    """Wait until a condition holds, and fail with its description if it never does."""

    def wait(
        condition: Callable[[], object],
        what: str,
        limit_s: float = PATIENCE_S,
        *,
        seen: Callable[[], object] | None = None,
    ) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            began = time.monotonic()
            if condition():
                return
            if time.monotonic() > deadline:
                instead = f"; seen: {seen()}" if seen else ""
                pytest.fail(f"{what}: not within {limit_s} s{instead}")
            # A look that takes long leaves the processor to what is waited for.
            time.sleep(max(0.05, time.monotonic() - began))

    return wait


class Cluster:
    """The sandbox of this test session."""

    used = False
    """Whether a test has called a command on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SANDBOX_DIR": str(folder)}
        login = subprocess.run(
            ["bash", "-c", f"{self('env')}\nenv -0"],
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        self.environ = dict(line.split("=", 1) for line in login.stdout.split("\0") if "=" in line)

    def __call__(self, *argv: str) -> str:
        """Run a command of the sandbox."""
        self.used = True
        done = subprocess.run(
            [SANDBOX, *argv], env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"sandbox {argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def slurm(self, *argv: str) -> str:
        """Run a command of Slurm as on the login node; a question again until it is answered."""
        deadline = time.monotonic() + PATIENCE_S
        done = self._run(*argv)
        while done.returncode and asks(*argv) and time.monotonic() < deadline:
            time.sleep(0.2)
            done = self._run(*argv)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def end_in(self, seconds: float, job_id: str) -> None:
        """Have a job's time be over soon, that of this attempt alone.

        Slurm moves TimeLimit, which holds for later attempts, too, with EndTime, by minutes: not
        for less than 90 s. It refuses a time that is over when it hears of it.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (end := self._end_of(job_id)) > (wanted := datetime.now() + timedelta(0, seconds)):
            assert time.monotonic() < deadline, f"{job_id} still ends at {end}, not at {wanted}"
            sooner = max(wanted, end - timedelta(seconds=80))
            self._run("scontrol", "update", f"jobid={job_id}", f"EndTime={sooner:%FT%T}")

    def _end_of(self, job_id: str) -> datetime:
        shown = self.slurm("scontrol", "-o", "show", "job", job_id)
        return datetime.fromisoformat(shown.partition(" EndTime=")[2].partition(" ")[0])

    @contextlib.contextmanager
    def configured(self, *lines: str, **changes: str) -> Iterator[None]:
        """Add lines to slurm.conf for a time; `changes` replace values of options that it has."""
        conf = self.folder / "etc/slurm.conf"
        before = conf.read_text()
        after = before
        for option, value in changes.items():
            after, count = re.subn(rf"\b{option}=[^,\s]*", f"{option}={value}", after)
            assert count == 1, f"{option} stands {count} times in {conf}"
        try:
            self._reconfigure(conf, "\n".join([after, *lines, ""]))
            yield
        finally:
            self._reconfigure(conf, before)

    def _reconfigure(self, conf: Path, text: str) -> None:
        """Replace the file at once: daemons still read it for the last time that they were told."""
        new = conf.with_suffix(".new")
        new.write_text(text)
        new.replace(conf)
        self.slurm("scontrol", "reconfigure")

    def have_all_nodes(self) -> None:
        """Wait until every node takes jobs again; name those that do not, and have them resume."""
        deadline = time.monotonic() + PATIENCE_S
        while lost := self._lost_nodes():
            if time.monotonic() > deadline:
                for line in lost:
                    self._run("scontrol", "update", f"nodename={line.split()[0]}", "state=resume")
                pytest.fail(f"nodes that take no jobs after this test: {', '.join(lost)}")
            time.sleep(0.1)

    def _lost_nodes(self) -> list[str]:
        """Return name, state and reason of each node that is out of use."""
        shown = {*self.slurm("sinfo", "-h", "-N", "-o", "%N %t %E").splitlines()}
        return sorted(line for line in shown if line.split()[1] not in ("idle", "mix", "alloc"))

    def _run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        self.used = True
        return subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, check=False, cwd=ROOT
        )


started: list[Cluster] = []
"""The cluster of this test session, once a test has needed it."""


def _without_slurm() -> str | None:
    """Say why real Slurm cannot run here."""
    if os.getuid() != 0:
        return "needs root: the sandbox makes network namespaces"
    if shutil.which("slurmctld") is None:
        return "needs Debian's Slurm packages: slurm/sandbox/sandbox install"
    return None


@pytest.fixture(autouse=True)
def all_nodes_take_jobs() -> Iterator[None]:
    """Insist that a test leaves the cluster as it was, since the next one may need every node."""
    yield
    for cluster in started:
        if cluster.used:
            cluster.have_all_nodes()
            cluster.used = False


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Slurm cluster of four nodes with fake GPUs.

    TOOLKIT_TEST_SLURM names the folder of another Slurm than the installed one (`sandbox fetch`).
    """
    if reason := _without_slurm():
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the Slurm tests: {reason}")
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    # KillWait is shorter than the checkpoints of some tests, as on many sites.
    argv = [str(SANDBOX), "up", "--nodes", "4", "--kill-wait", "5", "--dir", str(folder)]
    if other := os.environ.get("TOOLKIT_TEST_SLURM"):
        argv += ["--slurm", other]
    subprocess.run(argv, check=True)
    try:
        started.append(Cluster(folder))
        yield started[0]
    finally:
        started.clear()
        subprocess.run([SANDBOX, "down", "--dir", str(folder)], check=True)
        shutil.rmtree(folder)


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(cluster, tmp_path)
    yield made
    cluster.slurm("scancel", "--user=root")
