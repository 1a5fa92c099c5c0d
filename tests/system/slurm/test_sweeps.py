"""Sweeps: points, refusals, and a real job array whose points fail and continue."""

import doctest
import json
import re
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit.job.sweep
from tests.conftest import ROOT, Until
from tests.fakes import fake_slurm
from tests.support.asked_slurm import JOBS, job_row
from tests.support.run_records import remember
from tests.support.slurm_site import Site
from toolkit.api import open_run
from toolkit.cli.summary import summary_lines, summary_of
from toolkit.job.spec import JobSpec
from toolkit.runs.records.points import write_points
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.state import RunStatus
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.submission import SlurmJob, write_jobs

# ---- Points


def job(**more: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "probe", "module": "train", **more})


def settings_of(**groups: Any) -> list[dict[str, str | bool]]:
    return [dict(point.settings) for point in job(sweep=groups).points]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(toolkit.job.sweep).failed == 0


def test_grid_zip_and_list_are_multiplied_in_this_order() -> None:
    assert settings_of(
        grid={"--a": ["1", "2"], "env.B": ["x", "y"]},
        zip={"--c": [1, 2], "--d": [0.5, True]},
        list=[{}, {"--e": False}],
    ) == [
        {"--a": a, "env.B": b, "--c": c, "--d": d, **e}
        for a in "12"
        for b in "xy"
        for c, d in (("1", "0.5"), ("2", True))
        for e in ({}, {"--e": False})
    ]


def test_a_point_is_a_plain_job_with_its_options_and_variables() -> None:
    spec = job(
        args=["--task", "digits", "--lr", "1", "--fast", "--seed=3"],
        env={"A": "job", "B": "job"},
        sweep={"list": [{"--lr": "2", "--seed": 4, "--fast": False, "--new": "x", "env.B": "p"}]},
    )
    (point,) = spec.points
    made = spec.at(point)
    assert made.args == ("--task", "digits", "--lr", "2", "--seed=4", "--new", "x")
    assert made.env == {"A": "job", "B": "p"}
    assert made.sweep is None
    assert JobSpec.model_validate(made.as_written()) == made


KEYS = st.from_regex(r"--[a-z][-a-z.]{0,30}|env\.[A-Z]{1,9}X", fullmatch=True)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@settings(deadline=None, max_examples=100)
@given(grid=st.dictionaries(KEYS, st.lists(TEXTS, min_size=1, max_size=3, unique=True), min_size=1))
def test_names_of_points_are_short_safe_and_unique(grid: dict[str, list[str]]) -> None:
    points = job(sweep={"grid": dict(list(grid.items())[:4])}).points
    names = [point.name for point in points]
    assert len({name.lower() for name in names}) == len(names)
    for index, name in enumerate(names):
        assert len(name) <= toolkit.job.sweep.NAME_LENGTH
        assert set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=+-"
        )
        assert int(name[:4]) == index


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{}", "give grid, zip or list; found none of them"),
        ("{grid: {--lr: []}}", "sweep.grid.--lr: the list is empty"),
        ("{grid: {--lr: 0.1}}", "sweep.grid.--lr: must be a list, not 0.1"),
        ("{grid: {--lr: [1e-3]}}", 'write "1e-3" if you mean the text'),
        ("{grid: {--lr: [0.10]}}", '0.10 is read as 0.1; write "0.10" if you mean the text'),
        ("{grid: {--lr: [null]}}", "the value is missing"),
        ("{grid: {--lr: [[1]]}}", "a point has one value, not a list"),
        ("{grid: {resources.nnodes: [1, 2]}}", "'resources.nnodes' cannot vary"),
        ("{grid: {time_limit: [1h]}}", "'time_limit' cannot vary"),
        ("{grid: {env.RANK: [1]}}", "'RANK' is set by torchrun"),
        ("{grid: {env.A: [true]}}", 'true may be "1", "true" or "yes" to a program'),
        ("{grid: {env.S: [x, y]}}", "'S' is in both sweep and secrets: keep one"),
        ("{zip: {--a: [1, 2], --b: [1]}}", "--a has 2, --b has 1; make them equal"),
        ("{grid: {--a: [1]}, list: [{--a: 2}]}", "--a is in both grid and list"),
        ("{grid: {--a: [1, '1']}}", "points 0 and 1 set the same; leave one out"),
        ("{grid: {--seed: [true, false]}}", "a switch is, and args[0] gives it a value"),
        ("{list: [{--a: 1}], max_running: 0}", "max_running: must be at least 1, not 0"),
        ("{grid: {env.HF_TOKEN: [hf_abcdefghijklmnopqrst]}}", "a Hugging Face token (hf_…)"),
        ("{list: [{--api-key: hunter2hunter2}]}", "a value for api-key; a secret is never written"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_with_its_line(
    sweep: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nmodule: m\nsecrets: [S]\nargs: [--seed, '1']\nsweep: {sweep}\n")
    with pytest.raises(toolkit.SpecError) as refused:
        toolkit.load(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith((f"{path}:5: ", f"{path}: ", f"{path}:1: "))
    assert "hunter2" not in str(refused.value)


def test_an_argument_that_is_no_text_is_told_beside_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\nmodule: m\nargs: [--resume, yes]\nsweep: {grid: {--lr: [0.1, 0.2]}}\n"
    )
    with pytest.raises(toolkit.SpecError) as refused:
        toolkit.load(path)
    assert (
        str(refused.value)
        == f'{path}:3: args[1]: yes is a boolean to YAML 1.1; write "yes" if you mean the text'
    )


def test_what_one_point_cannot_do_is_refused_by_its_number() -> None:
    spec = job(sweep={"list": [{}, {"--api-key": "hunter2hunter2"}]})
    with pytest.raises(toolkit.PlanError, match=r"point 1: args\[1\] holds what looks") as refused:
        toolkit.plan(spec, toolkit.SlurmProfile(name="s"))
    assert "hunter2" not in str(refused.value)


# ---- The script


def test_every_point_reaches_torchrun_byte_for_byte(tmp_path: Path) -> None:
    hostile = [
        "it's $HOME `x` \\",
        "two\nlines\t*",
        '"quoted" # no',
        "",
        "#==== points",
        "$$",
        "--",
    ]
    spec = job(
        name="hostile",
        args=["first", "--text", "old"],
        env={"V": "job"},
        sweep={"zip": {"--text": hostile, "env.V": hostile}},
    )
    script = toolkit.render(toolkit.plan(spec, toolkit.SlurmProfile(name="s")))
    for index, (value, point) in enumerate(zip(hostile, spec.points, strict=True)):
        more = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index)}
        runs = tmp_path / "runs"
        (seen,) = fake_slurm.execute(script, tmp_path, nodes=1, run_dir=runs, more=more)
        text = ["--text=--"] if value == "--" else ["--text", value]
        words = [Template(word).safe_substitute() for word in seen.argv]  # as torchrun reads them
        assert words[-len(text) - 3 :] == ["-m", "train", "first", *text]
        assert seen.env["V"] == value
        assert seen.env["TRAIN_RUN_DIR"] == str(runs / point.name)


@pytest.mark.parametrize("retries", [{"requeue": 0}, {"requeue": 2}], ids=["once", "again"])
def test_arguments_of_points_name_their_own_folder_and_attempt_and_execute_nothing(
    retries: dict[str, int], tmp_path: Path
) -> None:
    hostile = [
        "$(touch executed)${TRAIN_RUN_DIR}/x y",
        "`touch executed`$TRAIN_ATTEMPT",
        "\"; touch executed; '$TRAIN_RUN_DIR'\n$(touch executed)",
        "\\$TRAIN_ATTEMPT ${TRAIN_RUN_DIR:-$(touch executed)} $TRAIN_RUN_DIRS $$TRAIN_RUN_DIR",
    ]
    spec = job(
        args=["--out=$TRAIN_RUN_DIR/$(touch executed)", "--try", "${TRAIN_ATTEMPT}"],
        retries=retries,
        sweep={"zip": {"--text": hostile, "env.V": hostile}},
    )
    script = toolkit.render(toolkit.plan(spec, toolkit.SlurmProfile(name="s")))
    for index, (value, point) in enumerate(zip(hostile, spec.points, strict=True)):
        more = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index)}
        runs = tmp_path / "it's a $(touch executed) folder"
        earlier = runs / point.name / "logs/attempt-0" if retries["requeue"] else None
        if earlier:
            earlier.mkdir(parents=True)
            (earlier / "since").write_text("0\n")
            (earlier / "nodes").write_text("node1\n")
            (earlier / "log").write_text("0 /dev/null\n")
            (earlier / "reason").write_text("preempted: so; queued again\n")
            more["SLURM_RESTART_COUNT"] = "1"
        (seen,) = fake_slurm.execute(script, tmp_path, nodes=1, run_dir=runs, more=more)
        known = {"TRAIN_RUN_DIR": f"{runs / point.name}", "TRAIN_ATTEMPT": "1" if earlier else "0"}
        words = [Template(word).safe_substitute() for word in seen.argv]  # as torchrun reads them
        assert words[-5:] == [
            f"--out={known['TRAIN_RUN_DIR']}/$(touch executed)",
            *("--try", known["TRAIN_ATTEMPT"]),
            *("--text", replaced(value, known)),
        ]
        assert seen.env["V"] == value, "variables are not replaced"
        assert {name: seen.env[name] for name in known} == known
    assert not list(tmp_path.rglob("executed"))


def replaced(text: str, known: dict[str, str]) -> str:
    """Return a text with the values of names that are not preceded by another dollar."""
    for name, value in known.items():
        text = value.join(re.split(rf"(?<!\$)\$(?:{name}\b|{{{name}}})", text))
    return text


# ---- Slurm's answers

_ARGV = "/r/probe-1/probe.sbatch /r/probe-1"
ROWS = JOBS + "".join(
    job_row(job_id, word, start=start, reason=reason, command=command)
    for job_id, word, start, reason, command in (
        ("77_2", "PENDING", "N/A", "JobArrayTaskLimit", _ARGV),
        ("77_1", "RUNNING", "2026-11-21T20:00:00", "None", _ARGV),
        ("78_0", "FAILED", "2026-11-21T20:00:09", "NonZeroExitCode", f"{_ARGV} continue"),
        ("77", "CANCELLED", "2026-11-21T20:00:07", "JobArrayTaskLimit", _ARGV),
    )
)
"""An answer of Slurm 22.05; the last row stands for tasks that were cancelled before they
started."""


def recorded(tmp_path: Path, *, rows: str = ROWS, error: str = "") -> tuple[SlurmRun, list[Any]]:
    """Return a sweep of five points whose first was submitted again, and the queries to Slurm."""
    run_dir = tmp_path / "probe-1"
    asked: list[Any] = []

    def command(argv: Any) -> "subprocess.CompletedProcess[str]":
        asked.append(list(argv))
        text = rows.replace("/r/probe-1", str(run_dir))
        return subprocess.CompletedProcess(argv, 1 if error else 0, text, error)

    run_dir.mkdir()
    spec = job(sweep={"grid": {"--a": list(range(5))}})
    write_points(run_dir, spec.points)
    write_jobs(run_dir, [SlurmJob(job_id="77"), SlurmJob(job_id="78", points=(0,))])
    profile = toolkit.SlurmProfile(name="s")
    record = RunRecord(
        uri="slurm://c/77",
        name="probe-1",
        job="probe",
        profile=profile.model_dump(),
        created=0.0,
        run_dir=run_dir,
    )
    return SlurmLauncher(profile, command=command).open(record), asked


def test_one_question_tells_where_all_points_stand(tmp_path: Path) -> None:
    sweep, asked = recorded(tmp_path)
    done = sweep.points[4].run_dir  # Slurm has forgotten it
    assert done is not None
    (done / "logs/attempt-0").mkdir(parents=True)
    (done / "outcome.json").write_text('{"status": "done", "attempt": 0}')
    (done / "metrics.jsonl").write_text('{"step": 7, "loss": 0.25}\n')
    found = summary_of(sweep)
    assert [argv[0] for argv in asked] == ["squeue"]
    assert list(summary_lines(found))[2:] == [
        "state:     RUNNING",
        "reason:    1 PENDING, 1 RUNNING, 1 SUCCEEDED, 1 FAILED, 1 CANCELLED",
        f"created:   {found['created']}",
        f"run_dir:   {sweep.run_dir}",
        "0000-a=0  FAILED     NonZeroExitCode",
        "0001-a=1  RUNNING",
        "0002-a=2  PENDING    JobArrayTaskLimit: the limit of points that run at once is reached",
        "0003-a=3  CANCELLED  never started",
        "0004-a=4  SUCCEEDED  step 7, loss 0.25",
    ]
    assert found["points"][2]["settings"] == {"--a": "2"}
    assert found["points"][0]["uri"] == "slurm://c/77_0"


def test_without_a_controller_a_sweep_is_unknown_and_cannot_be_submitted_again(
    tmp_path: Path,
) -> None:
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    sweep, _ = recorded(tmp_path, error=away)
    assert sweep.status() == RunStatus(
        state=toolkit.RunState.UNKNOWN, reason=f"5 UNKNOWN: {away}", lost=False
    )
    with pytest.raises(toolkit.LauncherError, match="5 of 5 points have not ended"):
        sweep.unfinished()
    with pytest.raises(toolkit.LauncherError, match="cannot be cancelled: slurm_load_jobs"):
        sweep.cancel()


@pytest.mark.parametrize("name", ["slurm://c/77_9", "slurm://c/77/0009-a=9", "77_0"])
def test_a_point_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    sweep, _ = recorded(tmp_path)
    assert sweep.run_dir is not None
    remember(
        sweep.uri,
        name=sweep.name,
        job="probe",
        profile=toolkit.SlurmProfile(name="s"),
        run_dir=sweep.run_dir,
    )
    assert open_run("slurm://c/77_3").name == "probe-1/0003-a=3"
    assert open_run(f"{sweep.run_dir}/0003-a=3/").uri == "slurm://c/77_3"
    with pytest.raises(toolkit.RunNotFound, match=r"has no point|no run '77_0'"):
        open_run(name)


# ---- A real cluster

POINT = """
case "$KIND $*" in
"bad "*"--lr 0.03"*) [ -e "$MENDED" ] || exit 2 ;;  # fatal until somebody mends it
"bad "*) mkdir "$TRAIN_RUN_DIR/failed" 2>/dev/null && exit 1 ;;  # once, which may pass
esac
exec python -m train "$@"
"""


def attempts(run: toolkit.Run) -> list[int]:
    folders = [point.run_dir for point in run.points]
    return [len(list(folder.glob("logs/attempt-*"))) for folder in folders if folder]


def states(run: toolkit.Run) -> list[str]:
    return [status.state.upper() for status in run.statuses()]


def forgotten(run: SlurmRun, site: Site) -> SlurmRun:
    """Return the run as another process sees it when Slurm has forgotten all of its jobs."""

    def command(argv: object) -> "subprocess.CompletedProcess[str]":
        text = "slurm_load_jobs error: Invalid job id specified"
        return subprocess.CompletedProcess([str(argv)], 1, "", text)

    return SlurmLauncher(site.profile, command=command).open(run.record)


@pytest.mark.slow
@pytest.mark.slurm
def test_only_the_point_that_failed_is_submitted_again(site: Site, tmp_path: Path) -> None:
    spec = job(
        name="probe",
        module=None,
        command=["bash", "-c", POINT, "bash"],
        args=["--task", "digits", "--epochs", "1"],
        env={"MENDED": str(tmp_path / "mended"), "OMP_NUM_THREADS": "1"},
        retries={"requeue": 1},
        sweep={"grid": {"--lr": ["0.03", "0.01"], "env.KIND": ["good", "bad"]}, "max_running": 2},
    )
    sweep = site.launcher.submit(toolkit.plan(spec, site.profile))
    followed = list(sweep.logs(follow=True))
    status = sweep.wait(300)
    # The last task of an array has the array's own id: its requeue must not take the others along.
    assert states(sweep) == ["SUCCEEDED", "FAILED", "SUCCEEDED", "SUCCEEDED"]
    assert (status.state, status.reason) == ("failed", "3 SUCCEEDED, 1 FAILED")
    assert attempts(sweep) == [1, 1, 1, 2]
    failed = sweep.point("0001-lr=0.03-kind=bad")
    assert "fatal: exit status 2" in failed.status().reason
    assert states(forgotten(sweep, site)) == states(sweep)
    assert sorted(followed) == sorted(sweep.logs())
    (failure,) = [point.failure() for point in sweep.points if point.failure()]
    assert str(failure).endswith(": exit status 2")

    (tmp_path / "mended").touch()
    assert open_run(f"{sweep.name}/0001-lr=0.03-kind=bad").uri == f"{sweep.uri}_1"
    site.launcher.resubmit(sweep)
    assert sweep.wait(300).state is toolkit.RunState.SUCCEEDED
    assert attempts(sweep) == [1, 2, 1, 2]
    assert [job.points for job in sweep.jobs] == [None, (1,)]
    assert "test_accuracy" in "\n".join(sweep.point("1").logs())
    ends = [
        line.split("]")[0][1:] for line in sweep.logs(grep=r"step \d+/\d+, epoch 1: .*accuracy")
    ]
    assert ends == [point.name.rpartition("/")[2] for point in sweep.points]
    assert states(forgotten(sweep, site)) == ["SUCCEEDED"] * 4
    with pytest.raises(toolkit.LauncherError, match="all points have succeeded"):
        site.launcher.resubmit(sweep)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_point_or_all_of_them_can_be_cancelled_and_go_on(site: Site, until: Until) -> None:
    loop = 'trap "exit 75" TERM; touch "$TRAIN_RUN_DIR/begun"; while :; do sleep 0.1; done'
    spec = job(
        module=None,
        command=["bash", "-c", '[ ! -e "$GO" ] || exit 0;' + loop, "bash"],
        env={"GO": str(site.runs / "go")},
        sweep={"grid": {"env.I": [0, 1, 2, 3]}, "max_running": 2},
    )
    sweep = site.launcher.submit(toolkit.plan(spec, site.profile))
    folders = [point.run_dir for point in sweep.points]
    until(lambda: all((f / "begun").exists() for f in folders[:2] if f), "two points run")
    assert states(sweep) == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    with pytest.raises(toolkit.LauncherError, match="4 of 4 points have not ended"):
        site.launcher.resubmit(sweep)
    sweep.point("0").cancel()
    sweep.point("3").cancel()
    until(lambda: states(sweep)[0] == "CANCELLED", "the first point is cancelled")
    until(lambda: states(sweep)[2] == "RUNNING", "another one runs in its place")
    until(lambda: folders[2] and (folders[2] / "begun").exists(), "it has begun")
    assert states(sweep)[1] == "RUNNING"
    sweep.cancel()
    assert sweep.wait(300).reason == "4 CANCELLED"
    assert states(forgotten(sweep, site)) == ["CANCELLED"] * 4

    (site.runs / "go").touch()
    site.launcher.resubmit(sweep.point("3"))
    until(lambda: states(sweep)[3] == "SUCCEEDED", "the point was run")
    assert states(forgotten(sweep, site)) == ["CANCELLED"] * 3 + ["SUCCEEDED"]
    site.launcher.resubmit(sweep)
    assert sweep.wait(300).reason == "4 SUCCEEDED"


@pytest.mark.slurm
def test_points_write_into_their_own_folders_and_a_requeued_one_sees_its_attempt(
    site: Site, until: Until
) -> None:
    code = 'mkdir -p "$1"; printf %s "$3" >"$1/$2"; [ "$5:$2" != again:0 ] || sleep 600'
    value = "$(touch executed)`touch executed`"
    spec = job(
        module=None,
        command=["bash", "-c", code, "bash"],
        args=["$TRAIN_RUN_DIR/out put", "$TRAIN_ATTEMPT", value],
        retries={"requeue": 1},
        sweep={"grid": {"--kind": ["again", "once"]}},
    )
    sweep = site.launcher.submit(toolkit.plan(spec, site.profile))
    again, once = (Path(str(point.run_dir)) / "out put" for point in sweep.points)
    until((again / "0").exists, "the first attempt runs")
    site.cluster.slurm("scontrol", "requeue", f"{sweep.uri.rpartition('/')[2]}_0")
    assert sweep.wait(300).reason == "2 SUCCEEDED"
    assert [sorted(path.name for path in folder.iterdir()) for folder in (again, once)] == [
        ["0", "1"],
        ["0"],
    ]
    assert {path.read_text() for path in (*again.iterdir(), *once.iterdir())} == {value}
    assert not [folder for folder in (ROOT, again, once) if (folder / "executed").exists()]


@pytest.mark.slurm
def test_a_thousand_points_are_one_array_and_one_too_many_is_told(site: Site) -> None:
    spec = job(sweep={"grid": {"--seed": list(range(1001))}}, sbatch={"hold": True})
    sweep = site.launcher.submit(toolkit.plan(spec, site.profile))
    assert sweep.status().reason == "1001 PENDING"
    sweep.cancel()
    assert sweep.status().reason == "1001 CANCELLED"
    more = job(sweep={"grid": {"--seed": list(range(1002))}})
    with pytest.raises(toolkit.LauncherError, match="at most as many points as MaxArraySize"):
        site.launcher.submit(toolkit.plan(more, site.profile))
    found = "\n".join(map(str, site.launcher.findings(toolkit.plan(more, site.profile))))
    assert "1002 points exceed MaxArraySize 1001" in found


def test_the_example_of_the_project_has_eight_points() -> None:
    points = toolkit.load(ROOT / "jobs/sweep.yaml").points
    assert [point.name for point in points[:2]] == ["0000-lr=0.03-seed=0", "0001-lr=0.03-seed=1"]
    assert len(points) == 8
    assert json.dumps([dict(point.settings) for point in points])
