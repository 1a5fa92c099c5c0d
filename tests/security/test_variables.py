"""Names of variables: no secret of a job is taken for a variable of the script that brings it."""

import re
import subprocess
from typing import Any

import pytest

import toolkit
from tests.support.planned import job as job_of
from tests.support.planned import site as site_of
from toolkit.job.types import RESERVED_NAMES
from toolkit.planning.compatibility import SHELL_VARIABLES
from toolkit.planning.plans import SCRIPT_VARIABLES

AGAIN = {"in_job": 3, "requeue": 2}
SCRIPTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("local", {"retries": {"in_job": 3}}, {}),
    ("slurm", {"resources": {"nnodes": {"min": 1, "max": 3}}, "retries": AGAIN}, {}),
    ("slurm", {"sweep": {"grid": {"--lr": ["1", "2"]}}, "retries": AGAIN}, {}),
    *(
        ("slurm", {"image": "a/b:1", "retries": AGAIN, "secrets": ["A"]}, {"runtime": runtime})
        for runtime in ("apptainer", "podman", "pyxis")
    ),
]
ARGUMENTS = {"jobid", "excnodelist", "label"}
"""What looks like an assignment, and is an argument of scontrol or podman."""

STARTS = {"main", "launch", "launch_once", "run_step", "node"}
"""Functions below which something starts that sees the job's secrets."""

FOR_OTHERS = {
    "_",
    "TORCH_LOGS_OUT",
    "SRUN_CPUS_PER_TASK",
    "IFS",
    "CUDA_VISIBLE_DEVICES",
    "LC_ALL",
    "PYTHONPATH",
}
"""What scripts set by names that are not their own: for torch, for Slurm, or for one command."""


def planned(kind: str, job: dict[str, Any], **site: Any) -> toolkit.LaunchPlan:
    return toolkit.plan(job_of(**job), site_of(kind, **site))


def assigned(script: str) -> set[str]:
    """Return the names of the variables that a script sets, functions' local ones excepted."""
    script = re.sub(
        r"'(---- end of \S+\.py)'( &&)?\n.*?\n\1\n", "'program'\n", script, flags=re.DOTALL
    )
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"  # .*", "", "\n".join(lines))
    text = re.sub(r" awk (?:-F \S+ )?'.*?\n +}'", " awk", text, flags=re.DOTALL)
    # Variables of torchrun
    text = re.sub(r"_environment=\(\n.*?\n\)", "_environment=()", text, flags=re.DOTALL)
    functions = re.findall(r"^(\w+)\(\) [{(]\n(.*?)^[})]", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"^\w+\(\) [{(]\n.*?^[})]", "", text, flags=re.DOTALL | re.MULTILINE)
    names = _assigned(outside)
    for function, body in functions:
        local = {
            word.partition("=")[0]
            for words in re.findall(r"\blocal ([^;&|\n]+)", body)
            for word in words.split()
        }
        assert not local or function not in STARTS, "what it starts would not see such a secret"
        names |= _assigned(body) - local
    return names


def _assigned(text: str) -> set[str]:
    names = set(re.findall(r"(?<![\w$/.{:=\",\\-])(?<!\\ )([A-Za-z_]\w*)\+?=(?!=)", text))
    names |= set(re.findall(r"\bfor (?:\(\()?(\w+)(?=;| in | = )", text))
    for words in re.findall(r"\b(?:read|mapfile) ((?:-\w+ )?[^;&|<)\n]+)", text):
        names |= {w.partition("=")[0] for w in words.split() if re.match(r"[A-Za-z_]\w*(=|$)", w)}
    return names


@pytest.mark.parametrize(("kind", "job", "site"), SCRIPTS)
def test_every_variable_of_a_script_has_a_name_that_no_secret_has(
    kind: str, job: dict[str, Any], site: dict[str, Any]
) -> None:
    names = assigned(toolkit.render(planned(kind, job, **site)))
    assert len(names) > 2
    others = (
        {name for name in names if not re.fullmatch(SCRIPT_VARIABLES, name)}
        - FOR_OTHERS
        - ARGUMENTS
    )
    assert {name for name in others if not RESERVED_NAMES.fullmatch(name)} == set()


@pytest.mark.parametrize("name", ["_endpoint", "_word", "_x9", "_aB"])
@pytest.mark.parametrize("kind", ["slurm", "local", "kubernetes"])
def test_a_secret_with_a_name_of_the_script_is_refused(kind: str, name: str) -> None:
    site = {"secret": "s"} if kind == "kubernetes" else {}
    why = "a variable of the pods" if kind == "kubernetes" else "reserved for variables of the "
    with pytest.raises(toolkit.ToolkitError, match=f"secrets: '{name}' is {why}"):
        planned(kind, {"secrets": [name]}, **site)


@pytest.mark.parametrize(
    "name", ["PATH", "IFS", "_", "RANDOM", "SECONDS", "UID", "OPTIND", "BASH_ENV"]
)
@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_a_secret_that_the_shell_takes_for_its_own_is_refused(kind: str, name: str) -> None:
    with pytest.raises(toolkit.ToolkitError, match=f"secrets: '{name}' has a meaning in the"):
        planned(kind, {"secrets": [name]})


@pytest.mark.parametrize("name", ["_run_dir", "_tries", "_failures", "HOSTNAME"])
@pytest.mark.parametrize("key", ["secrets", "env"])
def test_the_pods_entrypoint_overwrites_nothing(key: str, name: str) -> None:
    given: Any = [name] if key == "secrets" else {name: "x"}
    with pytest.raises(toolkit.ToolkitError, match=f"{key}: '{name}' is a variable of the pods'"):
        planned("kubernetes", {key: given}, secret="s")


def test_bash_knows_no_other_variables_of_its_own() -> None:
    said = subprocess.run(
        ["bash", "--norc", "-c", "compgen -v"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(said) > 20
    assert {
        n
        for n in said
        if not re.fullmatch(SHELL_VARIABLES, n) and not re.fullmatch(SCRIPT_VARIABLES, n)
    } == set()


@pytest.mark.parametrize("kind", ["slurm", "local", "kubernetes"])
def test_other_names_are_free(kind: str) -> None:
    names = [
        "https_proxy",
        "http_proxy",
        "HF_TOKEN",
        "Db_Pass",
        "endpoint",
        "folder",
        "__GL_X",
        "_X",
    ]
    site = {"secret": "s"} if kind == "kubernetes" else {}
    plan = planned(kind, {"secrets": names}, **site)
    assert plan is not None
