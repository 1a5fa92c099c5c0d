"""A project on its way to a login node: rsync itself, by an ssh that stays on this machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.told_operation import told_operation
from toolkit.errors import LauncherError
from toolkit.profile import SlurmProfile
from toolkit.slurm.login.ssh_host import SshLoginNode

SSH = """#!/bin/bash
[ "$1" != -G ] || exit 0
while [ "$1" = -o ]; do shift 2; done
while [ "$1" != near ]; do shift; done
shift
exec bash -c "$*"
"""


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshLoginNode:
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync: tests/packages.sh")
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "ssh").write_text(SSH)
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    for number in range(20):
        (project / f"file-{number}").write_bytes(bytes([number]) * 100_000)
    monkeypatch.chdir(project)
    profile = SlurmProfile.model_validate(
        {"name": "away", "via": "ssh near", "remote_dir": str(tmp_path / "there")}
    )
    return SshLoginNode(profile)


def test_how_much_of_the_project_has_been_copied_is_reported(login: SshLoginNode) -> None:
    folder = login.make("run-1")
    with told_operation() as told:
        login.bring(folder)
    assert len(list(Path(folder.there, "code").iterdir())) == 20
    what = {one[0] for one in told}
    assert what == {"copying the project to near (20 files)"}
    assert told[-1][1:] == (100, 100, "1.9 MiB")
    done = [one[1] for one in told]
    assert done == sorted(done)


def test_a_copy_that_fails_says_what_rsync_says(login: SshLoginNode) -> None:
    folder = login.make("run-1")
    shutil.rmtree(Path(folder.there, "code"))
    Path(folder.there, "code").write_text("in the way")
    with told_operation(), pytest.raises(LauncherError, match=r"rsync to near: rsync: .*code"):
        login.bring(folder)
