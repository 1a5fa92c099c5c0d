"""The calls of `make image` to an engine that is not installed: docker, by a strict stand-in.

The other engines build the real image before the tests begin. The stand-in refuses what docker 26
with buildx 0.13 was observed to refuse.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCKER = """#!{python}
import argparse, json, os, pathlib, sys

images = pathlib.Path(__file__).with_name("images")
parser = argparse.ArgumentParser(allow_abbrev=False)
commands = parser.add_subparsers(dest="command")
commands.add_parser("inspect").add_argument("--type")
commands.choices["inspect"].add_argument("image")
commands.add_parser("rmi").add_argument("image")
build = commands.add_parser("build")
build.add_argument("--quiet", action="store_true")
build.add_argument("--no-cache", action="store_true")
for option in ("--progress", "--network", "--iidfile", "--tag"):
    build.add_argument(option)
build.add_argument("-f", "--file")
for option in ("--label", "--build-arg", "--build-context"):
    build.add_argument(option, action="append", default=[])
build.add_argument("context", type=pathlib.Path)
given = parser.parse_args()

if given.command == "inspect":
    known = json.loads(images.read_text()).get(given.image)
    print(json.dumps([known] if known else []))
    sys.exit(not known)
if given.command == "build":
    if os.environ.get("DOCKER_BUILDKIT") != "1":
        sys.exit("unknown flag: --build-context")
    if given.quiet and given.progress:
        sys.exit("ERROR: progress=plain and quiet cannot be used together")
    file = given.file or given.context / "Dockerfile"
    text = sys.stdin.read() if file == "-" else pathlib.Path(file).read_text()
    if given.iidfile:
        pathlib.Path(given.iidfile).write_text("sha256:probe")
        print("#6 0.451 found 3 {minor} {machine} {glibc}", file=sys.stderr)
    if given.tag:
        labels = dict(label.split("=", 1) for label in given.label)
        known = {{"Id": "sha256:made", "Config": {{"Labels": labels}}, "Size": 2**30}}
        images.write_text(json.dumps(json.loads(images.read_text()) | {{given.tag: known}}))
        said = {{"file": text, "network": given.network, "contexts": given.build_context}}
        images.with_name("built").write_text(json.dumps(said))
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A folder with the stand-in alone, which has one base."""
    glibc = platform.libc_ver()[1]
    minor = sys.version_info.minor
    text = DOCKER.format(
        python=sys.executable, minor=minor, machine=platform.machine(), glibc=glibc
    )
    (tmp_path / "docker").write_text(text)
    (tmp_path / "docker").chmod(0o755)
    base = {"Id": "sha256:base", "Config": {"Labels": None}, "Size": 1}
    (tmp_path / "images").write_text(json.dumps({"base:1": base}))
    return tmp_path


def build(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ROOT / "train/build-image", *argv],
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_docker_is_told_what_it_takes_and_builds_once(docker: Path) -> None:
    done = build(docker, "base:1", "--image=i:1")
    assert done.returncode == 0, done.stderr
    assert "i:1: 1.00 GiB, built by docker in " in done.stdout
    built = json.loads((docker / "built").read_text())
    assert built["file"] == (ROOT / "train/Containerfile").read_text()
    assert built["network"] == "none"
    (wheels,) = built["contexts"]
    assert (Path(wheels.removeprefix("wheels=")) / "requirements.txt").is_file()
    again = build(docker, "base:1", "--image=i:1")
    assert (again.returncode, again.stdout) == (0, "i:1 is up to date\n")


def test_a_build_that_waits_for_another_one_says_so(docker: Path) -> None:
    assert build(docker, "base:1", "--image=i:1").returncode == 0
    argv = [sys.executable, str(ROOT / "train/build-image"), "base:1", "--image=i:1"]
    with (ROOT / ".cache/image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            argv,
            env={**os.environ, "PATH": str(docker)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stderr.readline() == "waiting for another build\n"
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert process.stdout.read() == "i:1 is up to date\n"
    assert process.returncode == 0


def test_an_engine_that_is_not_there_is_named_with_the_way_out(tmp_path: Path) -> None:
    done = build(tmp_path, "base:1")
    assert done.returncode == 2
    message = done.stderr.removeprefix("waiting for another build\n")  # of another test
    assert message.startswith("build-image: neither podman, buildah nor docker is installed; ")
    named = build(tmp_path, "base:1", "--engine=docker")
    assert named.stderr.startswith("build-image: docker is not installed; ")
