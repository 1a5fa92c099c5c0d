"""Options of sbatch from profile and job: which may be set, how they meet, what the site adds."""

import doctest
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.fakes import fake_slurm
from toolkit.errors import InputError, ProfileError
from toolkit.job import sbatch_options
from toolkit.job.sbatch_options import ALLOWED, DECIDED, FLAGS, OPTIONAL, VALUED


def job(**keys: Any) -> toolkit.JobSpec:
    return toolkit.JobSpec.model_validate({"name": "probe", "module": "train", **keys})


def options(spec: toolkit.JobSpec, **site: Any) -> dict[str, str | None]:
    """Return the options as bash's words in the rendered script."""
    profile = toolkit.SlurmProfile.model_validate({"name": "s", **site})
    text = toolkit.render(toolkit.plan(spec, profile))
    found: dict[str, str | None] = {}
    for line in re.findall("^#SBATCH (.*)$", text, re.MULTILINE):
        (word,) = shlex.split(line)
        name, equals, value = word.removeprefix("--").partition("=")
        assert name not in found, f"{name} stands twice"
        found[name] = value if equals else None
    return found


BASE = options(job())


def added(spec: toolkit.JobSpec, **site: Any) -> dict[str, str | None]:
    """Return what job and site add to the options of the smallest job."""
    return dict(options(spec, **site).items() - BASE.items())


def test_the_job_wins_over_the_profile_and_null_takes_back() -> None:
    site = {"reservation": "maint", "comment": "site's", "exclusive": True, "nice": 5, "wckey": "w"}
    mine = {"reservation": "mine", "comment": None, "constraint": "a100&nvlink", "wckey": "007"}
    assert added(job(sbatch=mine), sbatch=site) == {
        "reservation": "mine",
        "exclusive": None,
        "nice": "5",
        "constraint": "a100&nvlink",
        "wckey": "007",
    }


def test_the_job_wins_over_keys_of_the_profile_too() -> None:
    site = {"partition": "batch", "account": "nlp", "qos": "high", "exclusive": True}
    assert added(job(sbatch={"partition": "debug", "qos": None, "exclusive": "user"}), **site) == {
        "partition": "debug",
        "account": "nlp",
        "exclusive": "user",
    }


def test_facts_of_a_site_have_keys_of_their_own() -> None:
    site = {
        "switches": {"count": 2, "max_wait": "90m"},
        "exclusive": True,
        "licenses": ["matlab:2", "scratch@db"],
    }
    assert added(job(), **site) == {
        "switches": "2@01:30:00",
        "exclusive": None,
        "licenses": "matlab:2,scratch@db",
    }
    assert added(job(), switches={"count": 1}) == {"switches": "1"}


@pytest.mark.parametrize(
    ("site", "resources", "expected"),
    [
        ({}, {"memory": "10GiB", "cpus_per_node": 4}, {"mem": "10240M"}),
        ({"memory_flag": "mem-per-cpu"}, {"memory": "10GiB", "cpus_per_node": 4},
         {"mem-per-cpu": "2560M"}),
        ({"memory_flag": "mem-per-cpu"}, {"memory": "1GiB", "cpus_per_node": 3},
         {"mem-per-cpu": "342M"}),  # never less than was asked for
        ({"memory_flag": "mem-per-cpu"}, {"memory": "1GiB", "nproc_per_node": 2},
         {"mem-per-cpu": "512M"}),
        ({"memory_flag": "mem-per-cpu"}, {"cpus_per_node": 3}, {}),
    ],
)  # fmt: skip
def test_memory_is_asked_for_as_the_site_wants(
    site: dict[str, Any], resources: dict[str, Any], expected: dict[str, str]
) -> None:
    found = options(job(resources=resources), **site)
    assert {k: v for k, v in found.items() if k.startswith("mem")} == expected


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ({}, {"gpus-per-node": "4"}),
        ({"gpu_type": "h100"}, {"gpus-per-node": "h100:4"}),
        ({"gpus_flag": "gres"}, {"gres": "gpu:4"}),
        ({"gpus_flag": "gres", "gpu_type": "h100"}, {"gres": "gpu:h100:4"}),
        ({"gpus_flag": "gres", "sbatch": {"gres": "nvme:1"}}, {"gres": "gpu:4,nvme:1"}),
        ({"sbatch": {"gres": "nvme:1"}}, {"gpus-per-node": "4", "gres": "nvme:1"}),
        ({"gpus_flag": "gpus-per-task"}, {"gpus-per-task": "4"}),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(
    site: dict[str, Any], expected: dict[str, str]
) -> None:
    assert added(job(resources={"gpus_per_node": 4}), **site) == expected
    assert added(job(), **site) == site.get("sbatch", {})


def test_no_option_is_both_decided_and_free() -> None:
    assert not ALLOWED & DECIDED.keys()
    assert not FLAGS & OPTIONAL
    assert not VALUED & (FLAGS | OPTIONAL)


def refusal(folder: Path, line: str, *, kind: str = "job") -> str:
    path = folder / f"{kind}.yaml"
    path.write_text(f"name: a\nmodule: m\n{line}\n" if kind == "job" else f"kind: slurm\n\n{line}")
    with pytest.raises(InputError) as caught:
        toolkit.load(path) if kind == "job" else toolkit.load_profile(str(path))
    return str(caught.value).removeprefix(f"{path}:3: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{foo: 1}", "sbatch.foo: sbatch knows no option 'foo'; write its long name, as in "
         "sbatch's manual"),
        ("{reservations: x}", "sbatch.reservations: sbatch knows no option 'reservations'; "
         "did you mean 'reservation'?"),
        ("{p: x}", "sbatch.p: sbatch knows no option 'p'; write its long name, as in sbatch's "
         "manual"),
        ("{--qos: x}", "sbatch.--qos: '--qos' is written 'qos' here, as in sbatch's manual"),
        ("{mail_type: x}", "sbatch.mail_type: 'mail_type' is written 'mail-type' here, as in "
         "sbatch's manual"),
        ("{nodes: 2}", "sbatch.nodes: 'nodes' is set by the toolkit: set resources.nnodes"),
        ("{array: 1-4}", "sbatch.array: 'array' is set by the toolkit: set 'sweep': its points "
         "become the tasks of an array"),
        ("{comment: [a, b]}", "sbatch.comment: an option has one value, not a list; write it as "
         'Slurm does, like "a,b"'),
        ("{comment: {a: b}}", "sbatch.comment: an option has one value, not a mapping; write it "
         'as Slurm does, like "a,b"'),
        ("{exclusive: false}", "sbatch.exclusive: leave the option out; null cancels what the "
         "profile sets"),
        ("{nice: 1.5}", "sbatch.nice: a number with a decimal point has no unique form; write "
         '"1.5"'),
        ("{exclusive: yes}", 'sbatch.exclusive: yes is a boolean to YAML 1.1; write "yes" if you '
         "mean the text"),
        ('{comment: ""}', "sbatch.comment: the value is empty; write true for an option without "
         "a value"),
        ('{comment: "a\\nb"}', "sbatch.comment: it holds '\\n', which no #SBATCH line can hold"),
        ('{comment: "a\\x1b"}', "sbatch.comment: it holds '\\x1b', which no #SBATCH line can "
         "hold"),
        ("{comment: true, hold: 3}", "sbatch: comment needs a value; hold takes no value; write "
         "true"),
        ("{gres: 'nvme:1,gpu:4'}", "sbatch: gres asks for GPUs: set resources.gpus_per_node, and "
         "gpus_flag in the profile for the option that requests them"),
        ("[hold]", "sbatch: must be a mapping of keys to values, not a list"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["job", "profile"])
def test_what_cannot_be_set_is_refused_with_the_way_out(
    line: str, message: str, kind: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, f"sbatch: {line}", kind=kind) == message


@pytest.mark.parametrize("name", sorted(DECIDED))
def test_every_option_that_the_toolkit_sets_names_what_to_set(name: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, f"sbatch: {{{name}: x}}")
    assert said == f"sbatch.{name}: '{name}' is set by the toolkit: {DECIDED[name]}"


def test_options_of_the_command_line_keep_their_kinds(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nmodule: m\nsbatch: {comment: x}\n")
    sets = ["sbatch.exclusive=true", "sbatch.nice=7", "sbatch.comment=null", "sbatch.qos=high"]
    assert toolkit.load(path, sets).sbatch == {
        "exclusive": True,
        "nice": 7,
        "comment": None,
        "qos": "high",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition: a\nsbatch: {partition: b}", "'partition' is set both under sbatch and as a "
         "profile key: keep one"),
        ("gpus_flag: gpus-per-task\ngpu_type: a100", "gpus_flag 'gpus-per-task' with a gpu_type: "
         "Slurm 22.05 leaves CUDA_VISIBLE_DEVICES unset then; write gpus_flag: gres, or choose the "
         "nodes by sbatch: {constraint: …} and leave gpu_type out"),
        ("gpus_flag: gpu", "gpus_flag: 'gpu' is not a choice; did you mean 'gpus-per-node'?"),
        ('prolog: ["a\\nb"]', "prolog[0]: 'a\\nb' cannot be used; write one line of bash per item"),
        ("switches: 1", "switches: must be a mapping of keys to values, not 1"),
    ],
)  # fmt: skip
def test_what_a_site_cannot_mean_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"kind: slurm\n{text}\n")
    with pytest.raises(ProfileError) as caught:
        toolkit.load_profile(str(path))
    assert str(caught.value).partition(": ")[2] == message


def lines_of_a_site(folder: Path, epilog: list[str], entry: list[str]) -> tuple[int, str]:
    """Run a script with lines of the site; return its exit status and what the lines wrote."""
    profile = toolkit.SlurmProfile(
        name="s",
        prolog=(
            "set +e -x",
            f"echo prolog >>{folder}/lines",
            "export FROM_SITE='a  b'  # as it is",
        ),
        epilog=tuple(epilog),
    )
    spec = toolkit.JobSpec(name="probe", command=tuple(entry))
    environ = fake_slurm.install(folder, nodes=1)
    (folder / "bin/torchrun").write_text(
        f'#!/bin/sh\necho "$FROM_SITE" >>{folder}/lines\n{entry[0]}\n'
    )
    script = folder / "script.sh"
    script.write_text(toolkit.render(toolkit.plan(spec, profile)))
    argv = ["bash", str(script), str(folder / "run")]
    done = subprocess.run(argv, env=environ, capture_output=True, check=False)
    return done.returncode, (folder / "lines").read_text()


@pytest.mark.parametrize("last", ["true", "false", "exit 7", 'echo "$unset"', "# the end"])
@pytest.mark.parametrize(("entry", "status"), [("exit 0", 0), ("exit 3", 1)])
def test_lines_of_the_site_stand_around_the_job_and_leave_its_exit_status(
    last: str, entry: str, status: int, tmp_path: Path
) -> None:
    epilog = [f"echo epilog >>{tmp_path}/lines", last]
    found, lines = lines_of_a_site(tmp_path, epilog, [entry])
    assert lines == "prolog\na  b\nepilog\n"
    assert (found != 0) == (status != 0)
    said = (tmp_path / "run/logs/attempt-0/exit_status").read_text()
    assert said == f"{found}\n"


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(sbatch_options).failed == 0
