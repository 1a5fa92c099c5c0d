"""`toolkit check --server` compares a site's configuration with the assumptions of a plan."""

import doctest
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import toolkit
from tests.conftest import SANDBOX, Cluster
from toolkit.cli import cli
from toolkit.errors import LauncherError, ProfileError
from toolkit.slurm import SlurmLauncher
from toolkit.slurm import site_check as slurm_site

# Recorded from Slurm 22.05.8, shortened.
CONFIG = """\
Configuration data as of 2026-11-21T01:16:06
ClusterName             = sandbox
Epilog                  = (null)
JobSubmitPlugins        = \n\
KillWait                = 30 sec
PreemptMode             = REQUEUE
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=main AllowQos=ALL Default=YES DefaultTime=NONE MaxNodes=UNLIMITED \
MaxTime=2-01:00:00 Nodes=node[1-2] State=UP TotalCPUs=16 TotalNodes=2 JobDefaults=(null)
PartitionName=low AllowQos=ALL Default=NO DefaultTime=00:01:00 MaxNodes=1 \
MaxTime=00:30:00 Nodes=node[1-2] State=DRAIN TotalCPUs=16 TotalNodes=2 JobDefaults=(null)
PartitionName=high AllowQos=ALL Default=NO DefaultTime=00:05:00 MaxNodes=4 \
MaxTime=04:00:00 Nodes=node[1-9] State=UP TotalCPUs=72 TotalNodes=9 JobDefaults=(null)
"""
REFUSED = "/usr/bin/sbatch: unrecognized option '--segment=4'\nTry \"sbatch --help\" for more\n"


class Site:
    """Answers as a login node would."""

    def __init__(
        self,
        *,
        config: str = CONFIG,
        partitions: str = PARTITIONS,
        status: int = 0,
        refused: str = "",
        associations: str | None = None,
    ) -> None:
        self.answers = {"config": config, "partition": partitions}
        self.status = status
        self.refused = refused
        self.associations = associations
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        self.asked.append(list(argv))
        if argv[0] == "sh" and "--test-only" not in argv[2]:
            return subprocess.run(argv, capture_output=True, text=True, check=False)
        if argv[0] == "sh":
            return subprocess.CompletedProcess(argv, bool(self.refused), "", self.refused)
        if argv[0] == "id":
            return subprocess.CompletedProcess(argv, 0, "uid=7(ada) gid=7(ada)\n", "")
        if argv[0] == "sacctmgr":
            rows = (self.associations or "").splitlines()
            text = "\n".join(["Cluster|User|Account|QOS|", *(f"c|ada|{row}|" for row in rows)])
            return subprocess.CompletedProcess(argv, self.associations is None, text, "")
        if argv[0] == "sbatch":
            assert argv[-1] == "--usage", "it would submit"
            unknown = any(word.startswith("--segment") for word in argv)
            return subprocess.CompletedProcess(argv, int(unknown), "", REFUSED if unknown else "")
        return subprocess.CompletedProcess(argv, self.status, self.answers[argv[2]], "")


def findings(site: Site, profile: dict[str, Any] | None = None, **job: Any) -> list[str]:
    keys = {"name": "s", "kill_wait": "30s"} | (profile or {})
    made = toolkit.SlurmProfile.model_validate(keys)
    spec = toolkit.JobSpec.model_validate({"name": "probe", "module": "train", **job})
    found = SlurmLauncher(made, command=site).findings(toolkit.plan(spec, made))
    return [str(problem) for problem in found]


def test_a_plan_that_fits_its_site_finds_nothing_and_submits_nothing() -> None:
    site = Site()
    assert findings(site, resources={"nnodes": 2}, time_limit="2d") == []
    parsed = {argv[1].partition("=")[0] for argv in site.asked if argv[0] == "sbatch"}
    assert {"--nodes", "--time", "--signal", "--output", "--no-requeue"} <= parsed


@pytest.mark.parametrize(
    ("profile", "job", "found"),
    [
        ({"kill_wait": "15m"}, {}, [
            "scontrol show config: KillWait is 30s, and profile 's' says 15m; write kill_wait: 30s"
        ]),
        ({"partition": "mian"}, {}, [
            "scontrol show partition: partition 'mian' does not exist; this "
            "cluster has high, low, main"
        ]),
        ({}, {"time_limit": "3d"}, [
            "scontrol show partition: "
            "time_limit 3d exceeds MaxTime 2d1h of partition 'main'; write time_limit: 2d1h "
            "and let retries.requeue continue from there"
        ]),
        ({"partition": "high"}, {"stop": {"grace": "5m"}}, [
            "scontrol show partition: "
            "partition 'high' gives 5m where a job names no time, and the end of a run "
            "alone takes 6m30s; set time_limit"
        ]),
        ({"partition": "high"}, {"resources": {"nnodes": 5}, "time_limit": "1h"}, [
            "scontrol show partition: "
            "nnodes 5 exceeds the 4 nodes for one job (MaxNodes) of partition 'high'; ask "
            "for fewer, or name another partition"
        ]),
        ({}, {"resources": {"nnodes": 3}}, [
            "scontrol show partition: "
            "nnodes 3 exceeds the 2 nodes of partition 'main'; ask for fewer, or name "
            "another partition"
        ]),
        ({"partition": "low"}, {"time_limit": "10m"}, [
            "scontrol show partition: partition 'low' is DRAIN; sbatch refuses jobs"
        ]),
        ({}, {"sbatch": {"partition": "low,main"}}, []),
        ({}, {"sbatch": {"segment": 4}}, [
            "--segment: this site's sbatch refuses it: unrecognized option '--segment=4'; leave it "
            "out, or ask for its version"
        ]),
    ],
)  # fmt: skip
def test_what_the_site_contradicts_is_told_with_the_way_out(
    profile: dict[str, Any], job: dict[str, Any], found: list[str]
) -> None:
    assert findings(Site(), profile, **job) == found


def test_a_site_that_cancels_what_it_preempts_is_told() -> None:
    site = Site(config=CONFIG.replace("REQUEUE", "GANG,CANCEL").replace("22.05.8", "20.11.9"))
    assert findings(site) == [
        "scontrol show config: SLURM_VERSION is 20.11.9, and the script is tested with 22.05 and "
        "later; try a requeue before you rely on it"
    ]
    found = findings(site, retries={"requeue": 1})
    assert found[0].startswith("scontrol show config: PreemptMode is GANG,CANCEL: a preempted job")


def test_a_site_without_a_default_partition_wants_one_named() -> None:
    site = Site(partitions=PARTITIONS.replace("=YES", "=NO"))
    assert findings(site) == [
        "scontrol show partition: "
        "there is no default partition; name one of high, low, main in the profile"
    ]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (Site(config=CONFIG.replace("KillWait", "KillWhat")), "says nothing of KillWait"),
        (Site(partitions=PARTITIONS.replace("2-01", "soon")), "cannot be understood: 'Part"),
        (Site(partitions="PartitionName=main\n"), "names no partition, and prints 'Partition"),
        (Site(status=1), "scontrol refused"),
    ],
)
def test_an_answer_that_cannot_be_understood_is_no_verdict(site: Site, message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        findings(site)


def test_only_slurm_sites_are_asked() -> None:
    job = toolkit.JobSpec(name="probe", module="train")
    with pytest.raises(ProfileError, match="profile 'l' is not a Slurm site; only a Slurm site"):
        toolkit.ask_site(job, to=toolkit.LocalProfile(name="l"))


def test_the_command_wants_a_profile_to_ask() -> None:
    done = CliRunner().invoke(cli, ["check", "jobs/digits.yaml", "--server"])
    assert done.exit_code == 2
    assert "--server queries the site of a profile; name one with --to" in done.output


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(slurm_site).failed == 0


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")  # skips where Slurm cannot run
def test_nodes_of_the_cloud_count_before_they_are_started(tmp_path: Path) -> None:
    state = tmp_path / "sandbox"
    subprocess.run([SANDBOX, "up", "--nodes=1", "--cloud=10000", "--dir", state], check=True)
    try:
        login = Cluster(state)
        made = toolkit.SlurmProfile(name="s", partition="cloud", runs_dir=str(tmp_path))

        def command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                argv, env=login.environ, capture_output=True, text=True, check=False
            )

        def asked(nnodes: int) -> tuple[str, list[str]]:
            need = {"nnodes": nnodes}
            spec = toolkit.JobSpec.model_validate({"name": "p", "module": "m", "resources": need})
            fits = toolkit.plan(spec, made)
            script = tmp_path / "script"
            script.write_text(toolkit.render(fits))
            found = SlurmLauncher(made, command=command).findings(fits)
            said = command(["sbatch", "--test-only", str(script)]).stderr
            return said, [str(finding) for finding in found]

        said, found = asked(10_000)
        assert "using 10000 processors on nodes cloud[1-10000]" in said
        assert found == []
        said, found = asked(10_001)
        assert "Requested node configuration is not available" in said
        assert len(found) == 1
        assert "nnodes 10001 exceeds the 10000 nodes of partition 'cloud'" in found[0]
    finally:
        subprocess.run([SANDBOX, "down", "--dir", state], check=True)
