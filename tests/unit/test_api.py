"""What notebooks call: submit() and run(), of a job or of a plan."""

import dataclasses
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import toolkit
from tests.support.asked_slurm import CONFIG, JOBS
from toolkit import planning
from toolkit.cli import cli
from toolkit.planning import compatibility
from toolkit.planning.local import LocalPlan

JOB = toolkit.JobSpec.model_validate(
    {"name": "probe", "command": ("bash", "-c", 'echo "A is $A"'), "env": {"A": "1"}}
)


@pytest.fixture
def here(tmp_path: Path) -> toolkit.LocalProfile:
    return toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))


@pytest.fixture
def default(own_user: Path, tmp_path: Path) -> None:
    """Make a default profile, as `toolkit init` does."""
    folder = own_user / "config/torch-deploy-toolkit"
    (folder / "profiles").mkdir(parents=True)
    (folder / "profiles/mine.yaml").write_text(f"kind: local\nruns_dir: {tmp_path / 'mine'}\n")
    (folder / "default").write_text("profiles/mine.yaml\n")


def printed(run: toolkit.Run) -> str:
    assert run.wait(180).state is toolkit.RunState.SUCCEEDED, list(run.logs())
    return "\n".join(run.logs())


@pytest.mark.slow
def test_a_plan_is_submitted_as_it_is(here: toolkit.LocalProfile) -> None:
    plan = toolkit.plan(JOB, here)
    changed = dataclasses.replace(plan, env={**plan.env, "A": "2"})
    assert isinstance(changed, LocalPlan)
    assert "A is 2" in printed(toolkit.submit(changed))
    assert "A is 2" in printed(toolkit.run(changed))


def test_without_a_profile_the_default_one_is_taken(default: None, tmp_path: Path) -> None:
    run = toolkit.submit(JOB)
    assert "A is 1" in printed(run)
    assert run.run_dir is not None and run.run_dir.parent == tmp_path / "mine"


def test_without_any_profile_the_error_says_how_to_get_one(own_user: Path) -> None:
    with pytest.raises(toolkit.ProfileError, match="`toolkit init`, which detects the site"):
        toolkit.submit(JOB)


def test_a_plan_takes_no_other_profile(here: toolkit.LocalProfile) -> None:
    with pytest.raises(toolkit.ProfileError, match="leave `to` out"):
        toolkit.submit(toolkit.plan(JOB, here), to=here)


def test_run_is_for_this_machine() -> None:
    far = toolkit.SlurmProfile(name="far", runs_dir="/shared/runs", venv="/shared/venv")
    with pytest.raises(toolkit.ProfileError, match="'far' is not of this machine; use"):
        toolkit.run(JOB, to=far)


@pytest.mark.parametrize("program", ["Python", "command line"])
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_submission_is_planned_once(
    kind: str, program: str, own_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []

    def counted(job: toolkit.JobSpec, profile: toolkit.Profile, *, run_name: str) -> object:
        planned.append(profile.kind)
        return compatibility.refusals(job, profile, run_name=run_name)

    monkeypatch.setattr(planning, "refusals", counted)
    said = {"scontrol": CONFIG.format("c"), "sbatch": "Submitted batch job 7", "squeue": JOBS}
    for command, answer in said.items():
        (tmp_path / command).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "job.yaml").write_text("name: probe\ncommand: ['true']\n")
    site = tmp_path / "site.yaml"
    site.write_text(f"kind: {kind}\nruns_dir: {tmp_path / 'runs'}\n")
    if program == "Python":
        run = toolkit.submit(toolkit.load(tmp_path / "job.yaml"), to=str(site))
    else:
        done = CliRunner().invoke(cli, ["submit", str(tmp_path / "job.yaml"), "--to", str(site)])
        run = toolkit.open_run(done.stdout.strip())
    assert planned == [kind]
    if kind == "local":
        run.wait(180)
