"""Each line of a rendered text with the keys that it comes from."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import toolkit
from toolkit.cli.main import cli
from toolkit.origins import origins
from toolkit.rendering import payload

JOB = {
    "name": "mine",
    "script": "train.py",
    "args": ["--lr", "0.1"],
    "resources": {"nnodes": 2, "nproc_per_node": 1, "memory": "2GiB"},
    "time_limit": "10m",
    "env": {"WORD": "x", "OTHER": "y"},
    "retries": {"in_job": 3},
}


def keys_of(profile: toolkit.Profile, **changes: object) -> dict[str, set[str]]:
    """Return the keys of each line that has some."""
    job = toolkit.JobSpec.model_validate({**JOB, **changes})
    found = origins(job, profile)
    text = payload.folded(toolkit.render(toolkit.plan(job, profile)))
    assert [line for line, _ in found] == text.splitlines()
    return {line.strip(): set(keys) for line, keys in found if keys}


def test_lines_of_a_batch_script_have_the_keys_of_the_job_and_of_the_profile() -> None:
    profile = toolkit.SlurmProfile(name="site", partition="gpu", venv="/v", modules=["cuda"])
    keys = keys_of(profile)
    assert keys["#SBATCH --job-name=mine"] == {"name"}
    assert keys["#SBATCH --nodes=2"] == {"resources.nnodes"}
    assert keys["#SBATCH --mem=2048M"] == {"resources.memory"}
    assert keys["#SBATCH --time=00:10:00"] == {"time_limit"}
    assert keys["#SBATCH --partition=gpu"] == {"profile:partition"}
    assert keys["module load cuda"] == {"profile:modules"}
    assert keys["source /v/bin/activate"] == {"profile:venv"}
    assert keys["WORD=x"] == {"env.WORD"}
    assert keys["--restarts=3  # of the ranks, by torchrun"] == {"retries.in_job"}
    assert keys["--grace=60  # seconds that a checkpoint may take before the kill"] == {
        "stop.grace (default)"
    }
    assert keys["train.py --lr 0.1"] >= {"script", "args"}
    assert "#!/bin/bash" not in keys


@pytest.mark.parametrize(
    "profile",
    [
        toolkit.LocalProfile(name="here"),
        toolkit.SlurmProfile(name="site"),
        toolkit.KubernetesProfile(name="k", namespace="n"),
    ],
    ids=lambda profile: profile.kind,
)
def test_every_key_of_the_job_is_found_somewhere(profile: toolkit.Profile) -> None:
    changes = {"image": "i"} if profile.kind == "kubernetes" else {}
    found = set().union(*keys_of(profile, **changes).values())
    wanted = {"name", "script", "args", "env.WORD", "env.OTHER", "retries.in_job"}
    wanted |= {"resources.nnodes", "resources.nproc_per_node"}
    wanted |= {"resources.memory", "time_limit"} if profile.kind != "local" else set()
    assert found >= wanted
    assert not [key for key in found if not re.match(r"profile:|[a-z_]+(\.|$| \()", key)]


def test_a_sweep_is_one_key() -> None:
    keys = keys_of(toolkit.SlurmProfile(name="s"), sweep={"grid": {"--lr": ["0.1", "0.2"]}})
    assert keys["#SBATCH --array=0-1"] == {"sweep"}


def test_lines_of_a_template_of_ones_own_have_their_keys(tmp_path: Path) -> None:
    own = tmp_path / "slurm/train.sbatch.j2"
    own.parent.mkdir()
    own.write_text("#!/bin/bash\n# {{ plan.name }} {{ plan.max_nodes }}\necho {{ plan.grace_s }}\n")
    profile = toolkit.SlurmProfile(name="s", templates_dir=str(tmp_path))
    job = {"name": "mine", "script": "a.py", "resources": {"nnodes": 2}, "stop": {"grace": "70s"}}
    found = origins(toolkit.JobSpec.model_validate(job), profile)
    assert found == [
        ("#!/bin/bash", ()),
        ("# mine 2", ("name", "resources.nnodes")),
        ("echo 70", ("stop.grace",)),
    ]


def test_the_command_shows_keys_and_lines_in_columns(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\nscript: train.py\nresources: {nnodes: 3}\n")
    argv = ["render", str(tmp_path / "job.yaml"), "--to", "slurm", "--explain"]
    done = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len({line.index(" | ") for line in lines}) == 1
    (nodes,) = (line for line in lines if line.endswith("#SBATCH --nodes=3"))
    assert nodes.split(" | ")[0].rstrip() == "resources.nnodes"
