"""The command line: every mistake is a message and an exit status, never a traceback."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
import pytest
from click.testing import CliRunner

import toolkit
from toolkit.cli import cli
from toolkit.cli.output import echo_json, signals_cancel
from toolkit.runs.records import registry

ROOT = Path(__file__).parents[3]
TOOLKIT = Path(sys.executable).parent / "toolkit"
JOB = "name: digits\nmodule: train\nimage: localhost/train:latest\n"
COMMANDS = [
    "new",
    "init",
    "check",
    "render",
    "submit",
    "resubmit",
    "run",
    "list",
    "status",
    "top",
    "cancel",
    "wait",
    "logs",
    "stacks",
    "goodput",
    "report",
    "forward",
    "show",
    "schema",
    "supervisor",
    "completion",
    "man",
]

Result = subprocess.CompletedProcess[str]
Program = Callable[..., Result]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run the real `toolkit` as a user without runs and profiles, with a good `job.yaml`."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.yaml").write_text(JOB)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "COLUMNS": "100",
    }

    def run(*argv: str | bytes, **more: str) -> Result:
        done = subprocess.run(
            [TOOLKIT, *argv],
            env=environ | more,
            cwd=tmp_path / "work",
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
            timeout=300,
        )
        assert "Traceback" not in done.stderr
        return done

    return run


def outcome(done: Result) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


# ---- Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.yaml: the file is empty\n"),
        (b"- a\n", "bad.yaml:1: the file is not a mapping of keys to values\n"),
        (b"name: caf\xe9\n", "bad.yaml: is not UTF-8 text (byte 9)\n"),
        (b"\xff\xfen\x00a\x00", "bad.yaml: is not UTF-8 text (byte 0)\n"),
        (b"name: a\n\tmodule: m\n", "bad.yaml:2: a tab; YAML is indented with spaces\n"),
        (
            b"name: a\nmodule: m\nenv:\n  A: x\n  A: y\n",
            "bad.yaml:5: duplicate key 'A'; the first is at bad.yaml:4\n",
        ),
        (
            b"name: a\n---\nname: b\n",
            "bad.yaml:2: a second document begins; one file holds one\n",
        ),
        (
            b"name: a\nmodule: m\nargs: !!python/object/apply:os.system [touch x]\n",
            "bad.yaml:3: the tag 'tag:yaml.org,2002:python/object/apply:os.system' has no meaning "
            "here; leave it out\n",
        ),
        (b"name: a\nmodule: m\nargs: &a [*a]\n", "bad.yaml:3: an alias that never ends\n"),
        (b"[" * 200_000, "bad.yaml:1: more than 100 levels\n"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
            b"c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
            b"e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e]\n",
            "bad.yaml:1: more than 100000 values, aliases counted at each use\n",
        ),
        (
            b"name: a\nmodule: m\nresources: {nnodes: " + b"9" * 5000 + b"}\n",
            "bad.yaml:3: resources.nnodes: must be a whole number; "
            + "9" * 500
            + "…"
            + " is a number that not every reader can hold\n",
        ),
        (
            b"name: a\nmodule: m\x00\n",
            "bad.yaml:2: the character U+0000, which not every reader of YAML accepts\n",
        ),
        (
            b'name: a\nmodule: m\nargs: ["\\ud800"]\n',
            "bad.yaml:3: not YAML: found invalid Unicode character escape code\n",
        ),
        (
            b"nmae: a\nmodule: no\nargs: foo\nresources: 3\nenv: [a]\n",
            "bad.yaml:1: the key 'name' is missing\n"
            "bad.yaml:1: unknown key 'nmae'; did you mean 'name'?\n"
            'bad.yaml:2: module: no is a boolean to YAML 1.1; write "no" if you mean the text\n'
            "bad.yaml:3: args: must be a list, not 'foo'; write a list: args: [--lr, \"0.1\"]\n"
            "bad.yaml:4: resources: must be a mapping of keys to values, not 3\n"
            "bad.yaml:5: env: must be a mapping of keys to values, not a list\n",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, bytes) else "",
)
def test_a_bad_file_gives_its_problems_and_status_2(
    program: Program, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "work" / "bad.yaml").write_bytes(content)
    assert outcome(program("check", "bad.yaml")) == (2, "", message)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.yaml", "none.yaml: cannot be read: No such file or directory\n"),
        ("job.yaml/x", "job.yaml/x: cannot be read: Not a directory\n"),
        ("x" * 300, f"{'x' * 300}: cannot be read: File name too long\n"),
    ],
)
@pytest.mark.parametrize("command", ["check", "render"])
def test_a_file_that_cannot_be_read_gives_the_reason_and_status_2(
    program: Program, command: str, path: str, message: str
) -> None:
    argv = [command, path, *(["--to", "slurm"] if command == "render" else [])]
    assert outcome(program(*argv)) == (2, "", message)


def test_a_folder_is_no_job_to_render(program: Program) -> None:
    message = ".: cannot be read: Is a directory\n"
    assert outcome(program("render", ".", "--to", "slurm")) == (2, "", message)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ünïcode.yaml".encode(), "ünïcode.yaml"),
        (b"\xff.yaml", "\\udcff.yaml"),
        (b"a b\n'.yaml", "a b\n  '.yaml"),
    ],
)
def test_a_file_may_have_any_name(
    program: Program, tmp_path: Path, name: bytes, shown: str
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "work") + b"/" + name))
    path.write_text(JOB)
    assert outcome(program("check", name)) == (
        0,
        f"{shown}: fine: 1 x 1 processes\n",
        "",
    )


def test_a_good_file_is_fine(program: Program) -> None:
    assert outcome(program("check", "job.yaml", "--to", "slurm", "--to", "k8s")) == (
        0,
        "job.yaml: fine for slurm, k8s: 1 x 1 processes\n",
        "note: scancel by hand, and preemption without GraceTime, leave 30s (KillWait of profile "
        "'slurm'), less than stop.grace 1m; a checkpoint that takes longer is lost then\n"
        "note: profile 'k8s' names no runs_claim: checkpoints are lost with their pod\n",
    )


def test_check_gives_the_problems_of_every_profile(program: Program) -> None:
    argv = ["--set", "time_limit=10s", "--to", "local", "--to", "none", "--to", "k8s"]
    done = program("check", "job.yaml", *argv)
    assert done.returncode == 2
    fix = "; set a longer time_limit, or a shorter stop: {grace: …}"
    rule = "--set time_limit=10s: [stop-beyond-time-limit] stop.grace 1m does not fit: stop.grace "
    assert done.stdout.splitlines() == [
        f"{rule}alone takes 1m, and time_limit is 10s{fix}",
        f"{rule}and 15s for torchrun to end takes 1m15s, and time_limit is 10s{fix}",
    ]
    assert done.stderr.startswith("no profile 'none'; valid are k8s, local, slurm (searched ")


def test_set_reaches_the_job_and_leaves_the_file_alone(program: Program, tmp_path: Path) -> None:
    done = program("check", "job.yaml", "--set", "resources.nnodes=3", "--set", "env.LR=1e-3")
    assert outcome(done) == (0, "job.yaml: fine: 3 x 1 processes\n", "")
    assert (tmp_path / "work" / "job.yaml").read_text() == JOB


def test_what_set_gets_wrong_names_the_option(program: Program) -> None:
    argv: list[str | bytes] = ["--set", "resources.nnode=3", "--set", b"resources.nnodes=\xff"]
    assert outcome(program("check", "job.yaml", *argv)) == (
        2,
        "",
        "--set resources.nnode=3: unknown key 'nnode' under 'resources'; did you mean 'nnodes'?\n"
        "--set resources.nnodes=\\udcff: the character U+DCFF, which not every reader of YAML "
        "accepts\n",
    )


# ---- Commands and options


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_with_an_example(command: str) -> None:
    done = CliRunner().invoke(cli, [command, "--help"], catch_exceptions=False)
    *_, title, example = done.output.rstrip().splitlines()
    assert (done.exit_code, title) == (0, "Example:" if title[0] != " " else "  Example:")
    words = example.split()
    assert words[:2] == ["toolkit", command]


def test_the_help_lists_every_command(program: Program) -> None:
    context = click.Context(cli)
    assert cli.list_commands(context) == COMMANDS
    for name in COMMANDS:
        assert cli.get_command(context, name)  # imports its module
    assert sorted(cli.commands) == sorted(COMMANDS)  # the modules define no others
    done = program("--help")
    section = done.stdout.partition("Commands:\n")[2]
    assert re.findall(r"^  (\S+)", section, re.MULTILINE) == COMMANDS
    assert "..." not in section
    assert (done.returncode, program("-h").stdout) == (0, done.stdout)


def test_the_version_is_the_packages(program: Program) -> None:
    assert outcome(program("--version")) == (0, f"toolkit, version {toolkit.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "way_out"),
    [
        (["chekc", "job.yaml"], "'check'"),
        (["rendr", "job.yaml", "--to", "slurm"], "'render'"),
        (["check", "job.yaml", "--too", "slurm"], "'--to'"),
        (["render", "job.yaml", "--st", "a=b", "--to", "slurm"], "'--set'"),
        (["run", "job.yaml", "--epochs", "3"], "the job file: args: [--epochs, …]"),
        (["run", "job.yaml", "--lr", "3"], "the job file: args: [--lr, …]"),
        (["run", "job.yaml", "--nproc-per-node", "2"], "--set resources.nproc_per_node=…"),
        (["render", "job.yaml", "--output", "x"], ">FILE"),
        (["submit", "job.yaml", "--profile", "x"], "--to"),
        (["list", "--jsn"], "'--json'"),
        (["render", "job.yaml"], "--to"),
        (["check"], "'FILE...'"),
        (["cancel"], "'RUN...'"),
        (["wait", "x", "--timeout", "soon"], "'--timeout'"),
    ],
)
def test_a_wrong_command_line_names_what_is_right_with_status_2(
    program: Program, argv: list[str], way_out: str
) -> None:
    done = program(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert way_out in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["check", "render", "submit", "run"])
def test_an_unknown_profile_gets_the_nearest_with_status_2(
    program: Program, tmp_path: Path, command: str
) -> None:
    done = program(command, "job.yaml", "--to", "slrum")
    user = tmp_path / ".config/torch-deploy-toolkit/profiles"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no profile 'slrum'; did you mean 'slurm'? (searched ")
    assert done.stderr.endswith(f"{user}; a path works too)\n")


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("status", "digits-1120-174558-k3f9"),
        ("logs", "slurm://sandbox/1"),
        ("cancel", "a/b"),
        ("wait", ""),
    ],
)
def test_an_unknown_run_gets_a_message_and_status_2(
    program: Program, command: str, run: str
) -> None:
    assert outcome(program(command, run)) == (
        2,
        "",
        f"no run {run!r}; nothing was submitted from here yet (see `toolkit list`)\n",
    )


def test_an_unknown_run_may_have_any_name(program: Program) -> None:
    assert program("status", "x" * 300).returncode == 2


# ---- Output


@pytest.mark.parametrize("to", ["local", "slurm", "k8s"])
def test_render_prints_the_same_bytes_as_the_library(program: Program, to: str) -> None:
    done = [program("render", "job.yaml", "--to", to) for _ in range(2)]
    job = toolkit.JobSpec(name="digits", module="train", image="localhost/train:latest")
    kind = {
        "local": toolkit.LocalProfile,
        "slurm": toolkit.SlurmProfile,
        "k8s": toolkit.KubernetesProfile,
    }[to]
    text = toolkit.render(toolkit.plan(job, kind(name=to)))
    assert [outcome(one) for one in done] == [(0, text, "")] * 2


def into_closed_pipe(folder: Path, *argv: str) -> Result:
    """Like `| head -0`: no process reads, from the first byte on."""
    (folder / "job.yaml").write_text(JOB)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [TOOLKIT, *argv],
            cwd=folder,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("argv", [["render", "job.yaml", "--to", "slurm"], ["schema"]])
def test_a_reader_who_has_seen_enough_gets_no_complaint(tmp_path: Path, argv: list[str]) -> None:
    assert into_closed_pipe(tmp_path, *argv).stderr == ""


def test_a_reader_who_has_seen_enough_fails_no_pipeline(tmp_path: Path) -> None:
    assert into_closed_pipe(tmp_path, "schema").returncode == 0


def test_lists_of_nothing_say_so(program: Program) -> None:
    done = program("list", "--json")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "")
    assert outcome(program("list")) == (
        0,
        "no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one\n",
        "",
    )


@pytest.mark.parametrize("last", ["0", "-1"])
def test_a_list_has_at_least_one_run(program: Program, last: str) -> None:
    assert program("list", "--last", last).returncode == 2


# ---- How it begins


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback() -> None:
    code = """
import sys
import toolkit.__main__
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "toolkit.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
toolkit.__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_package_can_be_run() -> None:
    argv = [sys.executable, "-m", "toolkit", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert toolkit.__version__ in done.stdout


# ---- Late imports


@pytest.mark.parametrize(
    "work",
    [
        "import toolkit",
        "import toolkit.cli",
        "from toolkit.cli import cli; cli(['--help'], standalone_mode=False)",
        "from toolkit.cli import cli; cli(['render', 'job.yaml', '--to', 'slurm'], "
        "standalone_mode=False)",
        "from toolkit.cli import cli; cli(['render', 'job.yaml', '--to', 'k8s'], "
        "standalone_mode=False)",
        "from toolkit.cli import cli; cli(['check', 'job.yaml', '--to', 'local'], "
        "standalone_mode=False)",
        "from toolkit.cli import cli; cli(['list'], standalone_mode=False)",
    ],
    ids=lambda work: work.partition("cli(")[2][:10] or work,
)
def test_nothing_heavy_is_imported(tmp_path: Path, work: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    heavy = {"torch", "kubernetes", "submitit", "numpy", "train", "rich"}
    if work == "import toolkit":
        heavy |= {"pydantic", "jinja2", "yaml", "click", "toolkit.job.spec", "toolkit.runs"}
    if work == "import toolkit.cli" or "--help" in work:
        heavy |= {"pydantic", "jinja2", "yaml", "toolkit.job.spec", "toolkit.runs"}
    code = f"import sys\n{work}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "toolkit" in done.stderr.split()
    assert heavy & set(done.stderr.split()) == set()


def test_what_is_written_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    word = "h\u00e9llo \U0001f389"
    (tmp_path / "job.yaml").write_text(
        "name: probe\nscript: train.py\nargs: [" + word + "]\n", encoding="utf-8"
    )
    (tmp_path / "train.py").write_text(
        "import os, sys; print(os.fsencode(sys.argv[1]).hex())\n", encoding="utf-8"
    )
    kept = {name: of for name, of in os.environ.items() if not name.startswith("LC_")}
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ = {**kept, **ascii_only, "XDG_STATE_HOME": str(tmp_path / "state")}

    def done(*argv: str) -> bytes:
        found = subprocess.run(
            [TOOLKIT, *argv], cwd=tmp_path, env=environ, capture_output=True, check=False
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert word.encode() in done("render", "job.yaml", "--to", "slurm")
    shown = done("run", "job.yaml")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert word.encode().hex().encode() in shown
    assert toolkit.load(run_dir / "job.yaml").args == (word,)
    assert word in (run_dir / "run.sh").read_text(encoding="utf-8")


def test_an_output_on_a_full_disk_is_told_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [TOOLKIT, "render", str(ROOT / "jobs/digits.yaml"), "--to=local"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "the output cannot be written: No space left on device\n",
    )


def test_render_imports_only_what_its_place_needs() -> None:
    """An import that slips in makes each command slower; `make bench` shows by how much."""
    code = """
import sys
from toolkit.__main__ import main
sys.argv = ["toolkit", "render", "jobs/digits.yaml", "--to", "slurm"]
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("#!/bin/bash\n")
    modules = set(done.stderr.split())
    assert modules.isdisjoint(
        {
            *("torch", "kubernetes", "submitit", "importlib.metadata", "email", "difflib"),
            *("asyncio", "http", "subprocess", "jinja2.sandbox", "pydantic.functional_serializers"),
            *("toolkit.planning.kubernetes", "toolkit.planning.pods", "toolkit.planning.local"),
            *("toolkit.profile.kubernetes", "toolkit.rendering.templates_dir"),
            *("toolkit.rendering.patches", "toolkit.runs", "toolkit.text.untrusted"),
        }
    )


@pytest.fixture
def ended_run(tmp_path: Path) -> Path:
    """A run directory in which ten steps of a second have been recorded, of a run of anybody's."""
    folder = tmp_path / "ended"
    folder.mkdir()
    git = {
        "commit": "c0ffee",
        "branch": "lab",
        "dirty": True,
        "diff": "-a\n+\x1b]0;b\x07\n+c\u2028d\n",
    }
    launch = {
        "version": 1,
        "uri": "local://ended",
        "name": "ended",
        "job": "digits",
        "profile": {"name": "here"},
        "created": 1e9,
        "run_dir": str(folder),
        "provenance": {"toolkit": "0.1", "python": "3.11", "git": git},
    }
    (folder / "launch.json").write_text(json.dumps(launch))
    steps = [{"time": 1e9 + 10 + step, "step": step, "loss": 1.0} for step in range(11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    environment = {"time": 1e9 + 10, "event": "environment", "torch": "2.13", "nodes": [{}, 7]}
    (folder / "events.jsonl").write_text(json.dumps(environment) + "\n")
    (folder / "outcome.json").write_text(
        json.dumps({"version": 1, "status": "done", "attempt": 0, "time": 1e9 + 20})
    )
    return folder


def test_goodput_is_a_table_or_json(program: Program, ended_run: Path) -> None:
    done = program("goodput", str(ended_run))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ended: goodput 50.0% of 20.0 s (step 10, 1 start)",
        "   50.0%        10.0 s  productive     steps that count",
        "   50.0%        10.0 s  queue          waiting for nodes",
    ]
    (row,) = json.loads(program("goodput", str(ended_run), "--json").stdout)
    assert (row["name"], row["goodput"], row["seconds"]["queue"]) == ("ended", 0.5, 10)


def test_without_a_run_the_newest_is_taken_and_named(
    program: Program, ended_run: Path, tmp_path: Path
) -> None:
    message = "no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one\n"
    assert outcome(program("status")) == (2, "", message)
    record = registry.parse(json.loads((ended_run / "launch.json").read_text()))
    assert record is not None
    here = replace(record, profile={"kind": "local", "name": "here"})
    registry.add(here, environ={"HOME": str(tmp_path)})
    for command in ("goodput", "logs"):  # several runs, and one
        done = program(command)
        assert (done.returncode, done.stderr) == (0, "the newest run: ended\n")


def test_ctrl_c_stops_a_run_here_and_a_second_one_is_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    class Running:
        def cancel(self) -> None:
            asked.append("to stop")

    with signals_cancel(cast(toolkit.Run, Running())) as received:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert (received, asked) == ([signal.SIGINT] * 2, ["to stop"] * 2)
    way = "each rank has `stop.grace` to save, then it is killed\n"
    assert capsys.readouterr().err == f"stopping: {way}still stopping: {way}"


def test_a_script_in_place_of_a_job_file_gets_the_job_file_to_write(
    program: Program, tmp_path: Path
) -> None:
    done = program("run", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    (content,) = re.findall(
        r"^train.py: is a script, .*; write (\{.*\}) into job.yaml", done.stderr
    )
    (tmp_path / "work/job.yaml").write_text(content)
    assert program("check", "job.yaml", "--to", "slurm").returncode == 0


def test_a_report_is_a_file_with_the_name_of_its_run(
    program: Program, ended_run: Path, tmp_path: Path
) -> None:
    written = re.compile(r"written: (\S+) \(\d+ kB\)\n")
    for argv, name in (
        ([str(ended_run)], "ended.html"),
        ([str(ended_run)] * 2, "report.html"),
        ([str(ended_run), "-o", "../other.htm"], "../other.htm"),
    ):
        done = program("report", *argv)
        assert (done.returncode, done.stderr) == (0, "")
        match = written.fullmatch(done.stdout)
        assert match is not None and match[1] == name
        page = (tmp_path / "work" / name).read_text()
        assert page.startswith("<!DOCTYPE html>")
    assert program("report", str(ended_run), "-o", "-").stdout.startswith("<!DOCTYPE html>")
    (tmp_path / "work" / "ended.html").write_text("my own")
    done = program("report", str(ended_run))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "ended.html: exists and is not a report; name another file with --output\n"
    )
    assert (tmp_path / "work" / "ended.html").read_text() == "my own"


def test_show_tells_what_a_run_was_made_from(program: Program, ended_run: Path) -> None:
    done = program("show", str(ended_run))
    assert (done.returncode, done.stderr) == (0, "")
    assert "commit:      c0ffee (lab), with changes that are not committed\n" in done.stdout
    assert "torch:       2.13\n" in done.stdout
    diff = program("show", str(ended_run), "--diff").stdout
    # A terminal must not obey it; the lines are those of the files.
    assert diff.split("\n") == ["-a", "+\\x1b]0;b\\x07", "+c\\u2028d", ""]
    assert json.loads(program("show", str(ended_run), "--json").stdout)["toolkit"] == "0.1"


def test_a_run_without_a_diff_says_why(program: Program, ended_run: Path) -> None:
    launch = json.loads((ended_run / "launch.json").read_text())
    launch["provenance"] = "none"
    (ended_run / "launch.json").write_text(json.dumps(launch))
    done = program("show", str(ended_run), "--diff")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ended has no diff: it was not submitted from a git working tree\n"


def test_json_has_no_words_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of a run that has diverged is NaN."""
    echo_json({"metrics": [{"loss": float("nan"), "step": 1}], "most": float("inf"), "a": "\x1b"})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"metrics": [{"loss": None, "step": 1}], "most": None, "a": "\x1b"}
    assert "\x1b" not in shown


CLOSES = """
import os, pty, sys
ours, theirs = pty.openpty()
os.dup2(theirs, 1)
sys.stdout = open(1, "w", closefd=False)
from toolkit.cli.main import cli, main

def invoke(context):
    os.close(ours)
    print("a line", flush=True)

cli.invoke = invoke
main()
"""


def test_a_terminal_that_is_closed_is_no_failure() -> None:
    """Afterwards, isatty() is False for it."""
    argv = [sys.executable, "-c", CLOSES, "list"]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
