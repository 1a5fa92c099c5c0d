"""Templates of a site extend or replace ours; each mistake is reported with its line."""

import difflib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit
from tests.conftest import ROOT, TOOLKIT
from tests.support.golden import EXAMPLES
from toolkit.errors import RenderError

PAGE = (ROOT / "docs/how-to/templates.md").read_text()
BLOCKS = ("head", "environment", "launch", "after")
TEMPLATES = {
    "slurm": "slurm/train.sbatch.j2",
    "local": "local/run.sh.j2",
    "kubernetes": "kubernetes/pytorchjob.yaml.j2",
}


def example(language: str) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found[0]


def write(folder: Path, text: str, *, kind: str = "slurm") -> toolkit.Profile:
    """Write a template and the profile that names its folder."""
    path = folder / "templates" / TEMPLATES[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    profile = folder / "site.yaml"
    profile.write_text(f"kind: {kind}\ntemplates_dir: templates\n")
    return toolkit.load_profile(str(profile))


def rendered(profile: toolkit.Profile) -> str:
    job = toolkit.JobSpec(name="probe", module="train", image="i")
    return toolkit.render(toolkit.plan(job, profile))


SWEEP = {"grid": {"--at": ["$TRAIN_RUN_DIR", "$HOME"]}}


@pytest.mark.parametrize(
    ("kind", "sweep"), [(kind, None) for kind in sorted(TEMPLATES)] + [("slurm", SWEEP)]
)
def test_a_sites_templates_expand_arguments_as_ours_do(
    kind: str, sweep: Any, tmp_path: Path
) -> None:
    profile = write(tmp_path, f"{{% extends 'toolkit/{TEMPLATES[kind]}' %}}", kind=kind)
    args = ("--out=$TRAIN_RUN_DIR/x", "$HOME", "${TRAIN_ATTEMPT}")
    job = toolkit.JobSpec(name="probe", module="train", image="i", args=args, sweep=sweep)
    texts = {
        toolkit.render(toolkit.plan(job, profile.model_copy(update={"templates_dir": folder})))
        for folder in (None, profile.templates_dir)
    }
    assert len(texts) == 1


def test_the_example_of_the_page_extends_the_script(tmp_path: Path) -> None:
    profile = write(tmp_path, example("jinja"))
    plain = rendered(profile.model_copy(update={"templates_dir": None})).splitlines()
    lines = rendered(profile).splitlines()
    changes = difflib.unified_diff(plain, lines, n=0, lineterm="")
    changed = [line for line in changes if not line.startswith(("--- ", "+++ ", "@@ "))]
    assert [line for line in changed if "_pid" not in line] == [
        "+#SBATCH --comment='probe by site'",
        "+# ---- Data on the node's own disk",
        "+for folder in /data/digits '/data/it'\"'\"'s here'; do",
        '+  srun --export=ALL --ntasks-per-node=1 rsync -a "$folder" /local/',
        "+done",
        '-exec "${_batch[@]}" --signals="$_signals" -- \\',
        '+"${_batch[@]}" --signals="$_signals" -- \\',
        "-    -m train",
        "+    -m train &",
        "+",
        "+# ---- After the attempt: a signal to this script is for the supervisor, too",
        "+trap - EXIT",
        '+[ "$_status" -ne 0 ] || cp -r "$_run_dir/checkpoints" /archive',
        '+exit "$_status"',
    ]
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)


def test_the_profile_of_the_page_is_one(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(example("yaml"))
    profile = toolkit.load_profile(str(tmp_path / "site.yaml"))
    assert profile.templates_dir == str(tmp_path / "templates")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_extended_by_nothing_our_template_renders_the_same(kind: str, tmp_path: Path) -> None:
    text = f'{{% extends "toolkit/{TEMPLATES[kind]}" %}}\n'
    for block in BLOCKS:
        text += f"{{% block {block} %}}\n{{{{ super() }}}}{{% endblock %}}\n"
    profile = write(tmp_path, text, kind=kind)
    assert rendered(profile) == rendered(profile.model_copy(update={"templates_dir": None}))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_the_same_where_templates_see_plain_data(
    example: str, tmp_path: Path
) -> None:
    job, named, *changes = EXAMPLES[example]
    profile = toolkit.load_profile(str(ROOT / named))
    spec = toolkit.load(ROOT / job, changes)
    if "supervisor" in type(profile).model_fields:
        profile = profile.model_copy(update={"supervisor": "installed"})
    template = toolkit.plan(spec, profile).template
    path = tmp_path / template
    path.parent.mkdir(parents=True)
    path.write_text(f'{{% extends "toolkit/{template}" %}}')
    yours = profile.model_copy(update={"templates_dir": str(tmp_path)})
    assert toolkit.render(toolkit.plan(spec, yours)) == (ROOT / example).read_text()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_may_replace_ours(kind: str, tmp_path: Path) -> None:
    thing = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: probe}\n"
    rest = thing if kind == "kubernetes" else ""  # where it must be one
    profile = write(tmp_path, "# {{ job.name | sh }} {{ profile.kind }}\n" + rest, kind=kind)
    assert rendered(profile) == f"# probe {kind}\n{rest}"
    profile = write(tmp_path, "# changed, and a good deal longer\n" + rest, kind=kind)
    assert rendered(profile) == f"# changed, and a good deal longer\n{rest}"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\n{{ jobb.name }}\n", 2, "'jobb' is undefined; templates know plan, job, profile, "
         "version, supervisor"),
        ("{{ job.nmae }}\n", 1, "no key 'nmae'; did you mean 'name'?; "
         "templates know plan, job, profile, version, supervisor"),
        ("a\nb\n{% if %}\n", 3, "Expected an expression, got 'end of statement block'"),
        ("{{ job.name | quote }}\n", 1, "No filter named 'quote'."),
        ("\n{% include 'other.j2' %}\n", 2, "template 'other.j2' does not exist; the toolkit's own "
         "is 'toolkit/slurm/train.sbatch.j2'"),
        ("{% extends 'slurm/base.j2' %}\n", 1, "template 'slurm/base.j2' does not exist; the "
         "toolkit's own is 'toolkit/slurm/train.sbatch.j2'"),
        ("{{ 1 / 0 }}\n", 1, "ZeroDivisionError: division by zero"),
        ('\n\n{{ "a\\nb" | sbatch }}\n', 3, "'a\\nb' holds a control character, which no #SBATCH "
         "line can hold"),
        ('{{ "a\\nb" | sh_line }}\n', 1, "'a\\nb' holds a control character; write one line of "
         "bash per item"),
        ('{% extends "toolkit/slurm/train.sbatch.j2" %}\n{% block after %}\n{{ x }}{% endblock %}',
         3, "'x' is undefined; templates know plan, job, profile, version, supervisor"),
        ('{{ "a" | yaml }}\n', 1, "the filter 'yaml' needs the column of its block, such as "
         "yaml(4); for a value on one line, use 'yaml_flow'"),
        # A project's templates may be a stranger's.
        ("\n{{ cycler.__init__.__globals__.os.system('id') }}\n", 2, "SecurityError: access to "
         "attribute '__init__' of 'type' object is unsafe."),
        ("{{ job.env.update({'A': 'b'}) }}\n", 1, "no key 'update'; templates know plan, job, "
         "profile, version, supervisor"),
        ("{{ job.args.append('x') }}\n", 1, "SecurityError: access to attribute 'append' of "
         "'list' object is unsafe."),
        ("{{ job.parse_raw('x', proto='pickle', allow_pickle=True) }}\n", 1, "no key 'parse_raw'; "
         "templates know plan, job, profile, version, supervisor"),
    ],
)  # fmt: skip
def test_every_slip_is_told_with_its_line(
    text: str, line: int, message: str, tmp_path: Path
) -> None:
    profile = write(tmp_path, text)
    with pytest.raises(RenderError) as caught:
        rendered(profile)
    assert str(caught.value) == f"{tmp_path}/templates/slurm/train.sbatch.j2:{line}: {message}"


def test_a_template_that_is_no_text_is_told_with_its_line(tmp_path: Path) -> None:
    profile = write(tmp_path, '{% include "part.j2" %}')
    (tmp_path / "templates/part.j2").write_bytes(b"a\nb \xff\n")
    with pytest.raises(RenderError) as caught:
        rendered(profile)
    assert str(caught.value) == f"{tmp_path}/templates/part.j2:2: not UTF-8: byte 0xff"


def test_a_folder_without_the_template_is_refused(tmp_path: Path) -> None:
    profile = write(tmp_path, "x", kind="local").model_copy(update={"name": "s"})
    slurm = toolkit.SlurmProfile(name="s", templates_dir=profile.templates_dir)
    with pytest.raises(RenderError, match=r"templates' holds no slurm/train.sbatch.j2; write that"):
        rendered(slurm)
    nowhere = toolkit.SlurmProfile(name="s", templates_dir=str(tmp_path / "nowhere"))
    with pytest.raises(
        RenderError, match="nowhere' is not a folder; write that template, or leave"
    ):
        rendered(nowhere)


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, "\n{{ jobb }}\n")
    (tmp_path / "job.yaml").write_text("name: a\nmodule: m\n")
    for command in ("check", "render"):
        done = subprocess.run(
            [TOOLKIT, command, "job.yaml", "--to=./site.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"{tmp_path}/templates/slurm/train.sbatch.j2:2: 'jobb' is undefined; "
            "templates know plan, job, profile, version, supervisor\n"
        )


@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "JobSet", "Job"])
def test_a_part_of_a_manifest_is_changed_for_every_workload(tmp_path: Path, workload: str) -> None:
    """Manifests are made of parts; a folder that holds one of them is enough."""
    (part,) = re.findall(r"```jinja\n(\{% include \"toolkit/kubernetes.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "templates/kubernetes/environment.yaml.j2"
    path.parent.mkdir(parents=True)
    path.write_text(part)
    plain = toolkit.KubernetesProfile(name="k", workload=workload)
    yours = plain.model_copy(update={"templates_dir": str(tmp_path / "templates")})
    lines = difflib.unified_diff(
        rendered(plain).splitlines(), rendered(yours).splitlines(), n=0, lineterm=""
    )
    (added,) = [one for one in lines if not one.startswith(("---", "+++", "@@"))]
    entry = "- {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}"
    assert (added[0], added[1:].strip()) == ("+", entry)
    assert list(yaml.safe_load_all(rendered(yours)))[-1]["kind"] == workload


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("pod", "foo: [", ": not YAML: did not find expected node content"),
        ("job", "a: 1", ":1: an object without apiVersion and kind; every manifest needs both"),
        ("job", "- 1", ":1: not an object; write apiVersion, kind and metadata"),
        ("job", "", "the file holds no object"),
        ("job", "apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}", "holds no Job named 'a'"),
    ],
)
def test_what_is_no_manifest_is_told_wherever_it_is_rendered(
    part: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"templates/kubernetes/{part}.yaml.j2"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    folder = tmp_path / "templates"
    profile = toolkit.KubernetesProfile(name="k", workload="Job", templates_dir=str(folder))
    with pytest.raises(RenderError) as caught:
        toolkit.render(toolkit.plan(toolkit.JobSpec(name="a", module="m", image="i:1"), profile))
    assert str(caught.value).startswith(f"what {folder} renders")
    assert message in str(caught.value)


def test_our_own_templates_see_only_the_plan() -> None:
    for path in sorted((ROOT / "templates").rglob("*")):
        code = re.findall(r"{[{%](.*?)[}%]}", path.read_text() if path.is_file() else "", re.DOTALL)
        assert not [text for text in code if re.search(r"\b(job|profile)\.", text)], path


def test_without_a_supervisor_a_point_of_a_sweep_stops_only_itself() -> None:
    """The id of one of an array's tasks is that of the array: scancel would stop all of them."""
    job = {"name": "probe", "command": ("true",), "sweep": {"grid": {"--lr": ("1", "2")}}}
    profile = toolkit.SlurmProfile(name="s", supervisor="none")
    text = toolkit.render(toolkit.plan(toolkit.JobSpec.model_validate(job), profile))
    (stop,) = re.findall("scancel --signal=TERM ([^']+)'", text)
    assert stop == '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
