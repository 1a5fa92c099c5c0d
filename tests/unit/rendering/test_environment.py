"""Rendered text: the committed examples, real bash, and any value that a user may write."""

import doctest
import os
import re
import shlex
import shutil
import string
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
import toolkit.rendering.environment
from tests.fakes import fake_slurm
from tests.support.golden import EXAMPLES, ROOT, rendered
from tests.support.reference import PAGES
from toolkit.errors import RenderError
from toolkit.lint.scripts.options import read_directives
from toolkit.rendering import sbatch_quote, shell_quote

HOSTILE = [
    "",
    " ",
    "-",
    "--",
    "--nnodes=9",
    "-m",
    "'",
    '"',
    "it's",
    "$HOME",
    "${HOME}",
    "$(touch /tmp/owned)",
    "$$(touch /tmp/owned)",
    "`touch /tmp/owned`",
    "a;b",
    "a&&b",
    "a|b",
    "*",
    "?",
    "~",
    "!x",
    "#SBATCH --nodes=9",
    "\n#SBATCH --nodes=9\n",
    "line\nline",
    "cr\rlf\r\n",
    "tab\t",
    "%j %% %x",
    "{{ job.name }}",
    "{% raw %}",
    "{# x #}",
    "\\",
    "\\n",
    "a\\",
    "ünïcödé ☃ 🦀",
    "\u0085\u2028\u2029\ufeff",
    "\x01\x1b[31m\x7f",
    "@file",
    "a=b,c=d",
    "é" * 300,
]
text = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
)
PREDEFINED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOME"}
reserved = re.compile("PET_|TORCHELASTIC_|SLURM_|TRAIN_|PATH$|_$|OMP_NUM_THREADS$|CUDA_VISIBLE")
letters = string.ascii_letters + string.digits + "_"
env_names: st.SearchStrategy[str] = st.text(letters, min_size=1, max_size=12).filter(
    lambda name: not name[0].isdigit() and not (reserved.match(name) or name in PREDEFINED)
)
# torchrun swallows a leading `--`, and the spec refuses it with that reason.
arguments = st.lists(text, max_size=5).filter(lambda words: words[:1] != ["--"])
folder_names = text.filter(
    lambda name: 0 < len(name.encode()) < 200 and "/" not in name and name not in (".", "..")
)
entries = st.one_of(
    st.just({"module": "train"}),
    st.builds(
        lambda path: {"script": path}, text.filter(lambda t: bool(t) and not t.startswith("-"))
    ),
    st.builds(
        lambda first, rest: {"command": (first, *rest)},
        text.filter(lambda t: bool(t) and not t.startswith("-")),
        st.lists(text, max_size=2).filter(lambda words: words[:1] != ["--"]),
    ),
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rendering"))
    yield made
    shutil.rmtree(made)


def fresh(folder: Path) -> Path:
    """Return a path at which nothing lies."""
    return Path(tempfile.mkdtemp(dir=folder)) / "run"


def passed_on(argv: list[str]) -> list[str]:
    """Return the words that torchrun makes of these; a command's name stays as it is."""
    kept = 2 if argv[0] == "--no-python" else 0
    return argv[:kept] + [string.Template(word).safe_substitute() for word in argv[kept:]]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    entry=entries,
    args=arguments,
    env=st.dictionaries(env_names, text, max_size=4),
    mounts=st.lists(folder_names, max_size=2, unique=True),
    kind=st.sampled_from(["slurm", "local"]),
)
def test_any_value_arrives_byte_for_byte_under_bash(
    folder: Path,
    entry: dict[str, object],
    args: list[str],
    env: dict[str, str],
    mounts: list[str],
    kind: str,
) -> None:
    paths = [str(folder / "mounted" / name) for name in mounts]
    for path in paths:
        Path(path).mkdir(parents=True, exist_ok=True)
    job = toolkit.JobSpec.model_validate(
        {
            "name": "probe",
            **entry,
            "args": tuple(args),
            "env": env,
            "mounts": tuple({"source": path, "target": path} for path in paths),
            "resources": {"nnodes": 2},
        }
    )
    profile = toolkit.SlurmProfile(name="s") if kind == "slurm" else toolkit.LocalProfile(name="l")
    made = toolkit.plan(job, profile)
    script = toolkit.render(made)
    run_dir = fresh(folder)
    seen = fake_slurm.execute(script, folder, nodes=2, run_dir=run_dir)
    assert len(seen) == 2
    for torchrun in seen:
        assert passed_on(torchrun.argv[-len(job.entry) :]) == list(job.entry)
        assert {name: torchrun.env.get(name) for name in made.env} == dict(made.env)
        assert torchrun.env["TRAIN_RUN_DIR"] == str(run_dir)
    assert not Path("/tmp/owned").exists()


@pytest.mark.parametrize("entry", [{"module": "train"}, {"command": ["a b", "-c"]}])
@pytest.mark.parametrize(
    "profile", [toolkit.SlurmProfile(name="s"), toolkit.LocalProfile(name="l")]
)
def test_arguments_name_the_run_directory_and_the_attempt(
    folder: Path, profile: toolkit.Profile, entry: dict[str, object]
) -> None:
    args = [
        "--out=$TRAIN_RUN_DIR/x y",
        "${TRAIN_ATTEMPT}$TRAIN_ATTEMPT",
        "$TRAIN_RUN_DIRS",
        "$HOME",
    ]
    job = toolkit.JobSpec.model_validate({"name": "probe", **entry, "args": tuple(args)})
    run_dir = fresh(folder).parent / 'it\'s `a` "run" $(touch /tmp/owned)'
    made = toolkit.render(toolkit.plan(job, profile))
    (seen,) = fake_slurm.execute(made, folder, nodes=1, run_dir=run_dir)
    assert passed_on(seen.argv[-len(job.entry) :]) == [
        *job.program,
        *(f"--out={run_dir}/x y", "00", "$TRAIN_RUN_DIRS", "$HOME"),
    ]
    assert not Path("/tmp/owned").exists()


@pytest.mark.slow
@settings(max_examples=40)
@given(run_dir=folder_names)
def test_a_run_directory_may_have_any_name(folder: Path, run_dir: str) -> None:
    job = toolkit.JobSpec(name="probe", module="train")
    script = toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s")))
    path = fresh(folder).parent / run_dir
    (seen,) = fake_slurm.execute(script, folder, nodes=1, run_dir=path)
    assert seen.env["TRAIN_RUN_DIR"] == str(path)
    assert seen.env["PET_LOG_DIR"] == f"{path}/logs/attempt-0/node-0"


def test_each_node_gets_what_differs_and_shares_the_rest(folder: Path) -> None:
    job = toolkit.load(ROOT / "jobs/digits.yaml", ["resources.nnodes=3"])
    script = toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s")))
    run_dir = fresh(folder)
    seen = fake_slurm.execute(script, folder, nodes=3, run_dir=run_dir)
    assert [
        (s.env["PET_LOCAL_ADDR"], s.env["PET_RDZV_CONF"], s.env["PET_LOG_DIR"]) for s in seen
    ] == [
        ("node1", "is_host=1,join_timeout=600", f"{run_dir}/logs/attempt-0/node-0"),
        ("node2", "is_host=0,join_timeout=600", f"{run_dir}/logs/attempt-0/node-1"),
        ("node3", "is_host=0,join_timeout=600", f"{run_dir}/logs/attempt-0/node-2"),
    ]
    assert seen[0].argv == [
        f"--rdzv-endpoint=node1:{61000 + 1234}",
        "--rdzv-id=1234-0",
        "--tee=3",
        "--nnodes=3",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        *job.entry,
    ]
    assert seen[0].argv == seen[1].argv == seen[2].argv
    assert seen[0].env["SRUN_CPUS_PER_TASK"] == "1"


def test_ranks_that_an_attempt_has_left_do_not_meet_those_of_the_next(folder: Path) -> None:
    """A rank whose torchrun was killed goes on connecting to the port that it was given."""
    job = toolkit.load(ROOT / "jobs/digits.yaml", ["retries.in_job=0"])
    script = toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s")))
    run_dir, endpoints = fresh(folder), []
    for attempt in range(3):
        more = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        seen = fake_slurm.execute(script, folder, nodes=2, run_dir=run_dir, more=more)
        endpoints += [arg for arg in seen[0].argv if arg.startswith("--rdzv-endpoint=")]
    ports = (1234, 1234 + 1999, (1234 + 2 * 1999) % 4000)
    assert endpoints == [f"--rdzv-endpoint=node1:{61000 + port}" for port in ports]


@settings(max_examples=200)
@given(entry=entries, args=arguments)
def test_torchrun_takes_the_entry_as_it_stands(entry: dict[str, object], args: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    job = toolkit.JobSpec.model_validate({"name": "probe", **entry, "args": tuple(args)})
    made = toolkit.plan(job, toolkit.LocalProfile(name="l"))
    read = get_args_parser().parse_args([*made.torchrun, *job.entry])
    first = job.module or job.script or (job.command or ("",))[0]
    assert read.training_script == first
    assert read.training_script_args == [*(job.command or ())[1:], *args]
    assert (read.module, read.no_python) == (job.module is not None, job.command is not None)


@pytest.mark.parametrize("entry", [{"module": "train"}, {"command": ("prog",)}])
def test_an_argument_that_torchrun_would_swallow_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the first argument is '--', which torchrun"):
        toolkit.JobSpec.model_validate({"name": "probe", **entry, "args": ("--", "x")})


@settings(max_examples=300, deadline=None)
@given(text)
def test_shell_quote_keeps_every_value_on_one_line(value: str) -> None:
    assert "\n" not in shell_quote(value)
    assert "\r" not in shell_quote(value)


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\x00", "\x1b"])
def test_an_sbatch_value_that_would_break_its_line_is_refused(value: str) -> None:
    with pytest.raises(RenderError, match="control character"):
        sbatch_quote(value)


def test_sbatch_values_are_quoted_as_slurm_reads_them() -> None:
    profile = toolkit.SlurmProfile(name="s", partition="a;b", account="it's", qos="x#y")
    job = toolkit.JobSpec(name="probe", module="train")
    script = toolkit.render(toolkit.plan(job, profile))
    read = dict(
        shlex.split(line.removeprefix("#SBATCH --").replace("=", " ", 1))
        for line in script.splitlines()
        if re.match("#SBATCH --(partition|account|qos)=", line)
    )
    assert read == {"partition": "a;b", "account": "it's", "qos": "x#y"}


@settings(max_examples=500, deadline=None)
@given(st.text("ab\\\\'\"# -=$`", max_size=12))
def test_what_is_quoted_for_sbatch_is_read_as_one_value(value: str) -> None:
    (directive,) = read_directives(f"#SBATCH --comment={sbatch_quote(value)}\n")
    (option,) = directive.options
    assert option.value is not None
    assert (option.name, option.value.text) == ("comment", value)
    assert directive.stray == ()


@pytest.mark.parametrize("path", EXAMPLES)
def test_committed_examples_are_what_is_rendered(path: str) -> None:
    assert rendered(*EXAMPLES[path]) == (ROOT / path).read_text(), "run `make golden`"


@pytest.mark.parametrize("path", PAGES)
def test_reference_pages_say_what_the_code_says(path: str) -> None:
    assert PAGES[path]() == (ROOT / path).read_text(), "run `make golden`"


def test_no_example_is_forgotten() -> None:
    committed = {*ROOT.glob("slurm/examples/*"), *ROOT.glob("k8s/examples/*")}
    assert committed == {ROOT / path for path in EXAMPLES}


def scripts() -> dict[str, str]:
    """Return every kind of script, by name, hostile values among them."""
    found = {path: (ROOT / path).read_text() for path in EXAMPLES if path.startswith("slurm/")}
    hostile = toolkit.JobSpec(
        name="hostile",
        script="a 'b'.py",
        args=tuple(HOSTILE),
        env={f"V{n}": value for n, value in enumerate(HOSTILE)},
        secrets={"TOKEN": None},
        mounts=({"source": "/a b'c", "target": "/a b'c"},),
    )
    found["hostile on slurm"] = toolkit.render(
        toolkit.plan(hostile, toolkit.SlurmProfile(name="s", venv="/a b/$x", modules=("m;n",)))
    )
    for manager in ("conda:train", "mamba:/e/x;y$z", "micromamba:train", "pixi:/p/$x#cuda"):
        found[f"hostile in {manager}"] = toolkit.render(
            toolkit.plan(hostile, toolkit.SlurmProfile(name="s", environment=manager))
        )
    once = ["retries.in_job=0", "retries.requeue=0"]
    found["sweep once"] = toolkit.render(
        toolkit.plan(toolkit.load(ROOT / "jobs/sweep.yaml", once), toolkit.SlurmProfile(name="s"))
    )
    for runtime in ("apptainer", "podman", "pyxis"):
        profile = toolkit.SlurmProfile(
            name="s", runtime=runtime, mounts=({"source": "/a.b", "target": "/b"},)
        )
        more = ["workdir=/w", "secrets=[TOKEN]", "image=r.io/t:1"]
        for name, changes in ((runtime, more), (f"{runtime} once", more + once)):
            contained = toolkit.load(ROOT / "jobs/digits.yaml", changes)
            found[name] = toolkit.render(toolkit.plan(contained, profile))
    elastic = ["resources.nnodes={min: 2, max: 3}", "retries.in_job=2"]
    found["elastic"] = toolkit.render(
        toolkit.plan(
            toolkit.load(ROOT / "jobs/digits.yaml", elastic),
            toolkit.SlurmProfile(name="s", runtime="podman", prolog=("unset X",)),
        )
    )
    filed = toolkit.JobSpec(
        name="filed", module="train", secrets={"KEY": {"file": "~/a 'b/key"}, "TOKEN": None}
    )
    site = toolkit.SlurmProfile(name="s", prolog=("unset PYTHONPATH",), epilog=("rm -f /tmp/x",))
    found["lines and files on slurm"] = toolkit.render(toolkit.plan(filed, site))
    for name, notify in {
        "webhook": {"webhook": "https://h/a?b=c&d=$e#f;g", "events": ["end", "failure", "requeue"]},
        "webhook of a secret": {"webhook": "$KEY", "command": "cat >'it is' \"$X\""},
        "webhook in a file": {"webhook_file": "~/a 'b/hook"},
    }.items():
        for retries in ({}, {"requeue": 1, "in_job": 2}):
            telling = toolkit.JobSpec.model_validate(
                {"name": "tells", "module": "train", "notify": notify, "retries": retries}
                | {"secrets": {"KEY": None}, "resources": {"nnodes": 2}}
            )
            for place in (toolkit.SlurmProfile(name="s"), toolkit.LocalProfile(name="l")):
                which = f"{name}{', restarts,' if retries else ''} "
                which += "here" if place.kind == "local" else "on slurm"
                found[which] = toolkit.render(toolkit.plan(telling, place))
    for name, job in {
        "files here": filed,
        "hostile here": hostile,
        "digits here": toolkit.load(ROOT / "jobs/digits.yaml"),
    }.items():
        found[name] = toolkit.render(toolkit.plan(job, toolkit.LocalProfile(name="l")))
    return found


@pytest.mark.parametrize("name", sorted(scripts()))
def test_scripts_pass_bash_n_and_shellcheck(name: str, tmp_path: Path) -> None:
    if not os.environ.get("CI") and shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    # Hints on what a value may mean are for the author of the value.
    severity = "warning" if name.startswith("hostile") else "style"
    path = tmp_path / "script.sh"
    path.write_text(scripts()[name])
    for argv in (["bash", "-n"], ["shellcheck", "--shell=bash", f"--severity={severity}"]):
        done = subprocess.run([*argv, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_script_itself_expands_no_dollar_parentheses_once_it_has_traps() -> None:
    """bash 5.2 loses a signal that comes while it expands $(...) or <(...)."""
    for name, script in scripts().items():
        if name.startswith("hostile") or "lines" in name:
            continue  # which bring lines of their own
        if " toolkit.supervisor local " in script:
            continue  # which has the traps
        rest = re.split(r"^trap ", script, maxsplit=1, flags=re.M)[-1]
        assert rest != script, name
        known = re.sub(r"^\s*#.*$|  # .*$", "", rest, flags=re.MULTILINE)
        assert re.findall(r".*(?:\$\((?!\()|[<>]\(|`).*", known) == [], name


def test_a_missing_secret_stops_the_job_before_anything_starts(folder: Path) -> None:
    job = toolkit.JobSpec(name="probe", module="train", secrets={"TOKEN": None})
    environ = fake_slurm.install(folder, nodes=1)
    script = folder / "secret.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    argv = ["bash", str(script), str(fresh(folder))]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "TOKEN: is a secret of this job; export it first" in done.stderr


def test_a_secret_never_enters_the_script() -> None:
    job = toolkit.JobSpec(name="probe", module="train", image="i", secrets={"TOKEN": None})
    for profile in (
        toolkit.SlurmProfile(name="s"),
        toolkit.LocalProfile(name="l"),
        toolkit.KubernetesProfile(name="k", secret="tokens"),
    ):
        lines = [
            line
            for line in toolkit.render(toolkit.plan(job, profile)).splitlines()
            if "TOKEN" in line
        ]
        assert len(lines) == 1


def test_rendering_is_the_same_in_every_process() -> None:
    code = (
        "import toolkit; print(toolkit.render(toolkit.plan(toolkit.load('jobs/digits.yaml'), "
        "toolkit.load_profile('slurm'))), end='')"
    )
    python = shutil.which("python", path=str(ROOT / ".venv/bin")) or "python3"
    outputs = {
        subprocess.run(
            [python, "-c", code],
            env={"PYTHONHASHSEED": seed, "HOME": "/nonexistent", "LC_ALL": "C"},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (script,) = outputs
    assert b"\n# supervisor.pyz: UEsD" in script


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(toolkit.rendering.environment).failed == 0
