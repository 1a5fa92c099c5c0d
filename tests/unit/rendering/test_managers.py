"""Environments of conda, micromamba and pixi: activated by their own hooks, in the batch script.

Stand-ins print the hooks, as the managers of 2026 do: shell functions, whose activation runs what
packages have left in `activate.d`.
"""

import re
import subprocess
from pathlib import Path

import pytest

import toolkit

CONDA = """#!/bin/sh
[ "$1 $2" = "shell.bash hook" ] || exit 2
cat <<'END'
NAME() {
  [ "$1" = activate ] || return 2
  case "$2" in train | /shared/envs/train) ;; *) echo "NotFound: $2" >&2; return 1 ;; esac
  false  # a package's own script
  export CONDA_PREFIX=/envs/train
}
END
"""

MICROMAMBA = CONDA.replace("shell.bash hook", "shell hook")

PIXI = """#!/bin/sh
[ "$1" = shell-hook ] || exit 2
printf 'false; export PIXI="%s"\\n' "$*"
"""


def activated(folder: Path, environment: str, program: str | None) -> tuple[int, str, str]:
    """Run the part of a script that makes the environment; return what that sets."""
    profile = toolkit.SlurmProfile(name="s", environment=environment)
    script = toolkit.render(toolkit.plan(toolkit.JobSpec(name="t", module="m"), profile))
    part = re.search(r"# ---- Environment\n(.*?)_environment=\(", script, re.DOTALL)
    assert part
    name = environment.partition(":")[0]
    (folder / "bin").mkdir()
    if program is not None:
        (folder / "bin" / name).write_text(program.replace("NAME", name))
        (folder / "bin" / name).chmod(0o755)
    text = f'set -eo pipefail\n{part[1]}\necho "<$CONDA_PREFIX$PIXI>"'
    environ = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", text], env=environ, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environment", "program", "made"),
    [
        ("conda:train", CONDA, "/envs/train"),
        ("conda:/shared/envs/train", CONDA, "/envs/train"),
        ("mamba:train", CONDA, "/envs/train"),
        ("mamba:train", MICROMAMBA, "/envs/train"),
        ("micromamba:train", MICROMAMBA, "/envs/train"),
        ("pixi:/p/a;b", PIXI, "shell-hook --shell bash --manifest-path /p/a;b"),
        ("pixi:.#cuda", PIXI, "shell-hook --shell bash --manifest-path . --environment cuda"),
    ],
)
def test_a_managers_own_hook_activates_its_environment(
    environment: str, program: str, made: str, tmp_path: Path
) -> None:
    assert activated(tmp_path, environment, program) == (0, f"<{made}>\n", "")


@pytest.mark.parametrize(
    ("environment", "program", "said"),
    [
        ("conda:other", CONDA, "NotFound: other"),
        ("conda:train", None, "conda: command not found"),
        ("pixi:/p", None, "pixi: command not found"),
        ("pixi:/p", "#!/bin/sh\necho no manifest >&2\nexit 1\n", "no manifest"),
    ],
)
def test_a_job_without_its_environment_ends_with_the_managers_words(
    environment: str, program: str | None, said: str, tmp_path: Path
) -> None:
    status, out, err = activated(tmp_path, environment, program)
    assert (status != 0, out) == (True, "")
    assert said in err


def test_a_relative_project_is_below_the_folder_on_the_login_node() -> None:
    profile = toolkit.SlurmProfile(name="s", via="ssh login1", environment="pixi:.#cuda")
    script = toolkit.render(toolkit.plan(toolkit.JobSpec(name="t", module="m"), profile))
    assert "--manifest-path ~/torch-deploy-toolkit/. --environment cuda)" in script


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment": "train"}, "write conda:NAME"),
        ({"environment": "uv:."}, "for uv, set venv to its .venv"),
        ({"environment": "conda:~/envs/x"}, "write conda:NAME"),
        ({"environment": "conda:x y"}, "write conda:NAME"),
        ({"environment": "pixi:/p#a b"}, "write conda:NAME"),
        ({"environment": "conda:x", "venv": ".venv"}, "a job has one of them"),
        ({"environment": "conda:x", "runtime": "podman"}, "no container sees it"),
    ],
)
def test_what_cannot_be_activated_is_refused(
    keys: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("kind: slurm\n" + "".join(f"{k}: '{v}'\n" for k, v in keys.items()))
    with pytest.raises(toolkit.InputError, match=re.escape(message)):
        toolkit.load_profile(str(path))
