"""What a stranger's template can reach: plain data, and nothing to call but what is listed."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

import toolkit
from tests.conftest import TOOLKIT
from tests.support.golden import EXAMPLES, ROOT
from toolkit.rendering.template_process import FUNCTIONS, METHODS, sandbox
from toolkit.rendering.templates_dir import plain

PLAIN = (dict, list, str, int, float, bool, type(None))


def known(example: str) -> dict[str, Any]:
    """Return the names that templates of an example know, as the process is given them."""
    job, profile, *changes = EXAMPLES[example]
    made = toolkit.plan(
        toolkit.load(ROOT / job, changes), toolkit.load_profile(str(ROOT / profile))
    )
    (shown, *_) = map(plain, made.objects)
    return {"plan": shown, "job": shown["job"], "profile": shown["profile"], "version": "1"}


def reachable(environment: jinja2.Environment, values: dict[str, Any]) -> Iterator[str]:
    """Yield what can be called, going on from names by key, by position and by attribute."""
    waiting = list(values.items())
    seen = set[int]()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        assert type(value) in PLAIN, name
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", entry) for key, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{name}[{at}]", entry) for at, entry in enumerate(value)]
        for attribute in dir(value):
            found = environment.getattr(value, attribute)
            if not isinstance(found, jinja2.Undefined) and callable(found):
                yield f"{type(value).__name__}.{attribute}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_template_reaches_nothing_to_call_but_what_is_listed(
    example: str, tmp_path: Path
) -> None:
    environment = sandbox(tmp_path)
    listed = {f"{kind.__name__}.{name}" for kind, names in METHODS.items() for name in names}
    assert set(reachable(environment, known(example))) == listed
    assert set(environment.globals) == FUNCTIONS
    assert "random" not in environment.filters


PICKLE = "cos\\nsystem\\n(S'touch %s'\\ntR."
ESCAPES = [
    "{{ job.parse_raw(\"PICKLE\", proto='pickle', allow_pickle=True) }}",
    "{{ profile.parse_raw(\"PICKLE\", proto='pickle', allow_pickle=True) }}",
    "{{ plan.job.parse_file('evil.pkl', proto='pickle', allow_pickle=True) }}",
    "{{ range.__self__.system('touch MARK') }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ joiner.__init__['__globals__'].sys.modules.os.system('touch MARK') }}",
    "{{ (cycler | attr('__init__') | attr('__globals__')).os.system('touch MARK') }}",
    "{{ namespace.__init__.__builtins__.__import__('os').system('touch MARK') }}",
    "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(job)[0]('touch MARK') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__()[0]('touch MARK') }}",
    "{{ self.__init__.__globals__.os.system('touch MARK') }}",
    "{% macro m() %}{{ caller.__call__.__globals__.os.system('touch MARK') }}{% endmacro %}"
    "{% call m() %}{% endcall %}",
    "{% for x in [1] %}{{ loop.__init__.__globals__.os.system('touch MARK') }}{% endfor %}",
    "{{ ([job] | map('attr', '__class__') | list)[0].__mro__[1].__subclasses__() }}",
    "{{ (job.items | attr('__self__')).clear() }}{{ job.items.__self__.clear() }}",
]
KINDS = {
    "local": "local/run.sh.j2",
    "slurm": "slurm/train.sbatch.j2",
    "kubernetes": "kubernetes/pytorchjob.yaml.j2",
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_escape_of_a_cloned_project_runs_code(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "MARK"
    template = tmp_path / "t" / KINDS[kind]
    template.parent.mkdir(parents=True)
    (tmp_path / "evil.pkl").write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    folder = tmp_path / ("k8s" if kind == "kubernetes" else "slurm") / "profiles"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(f"kind: {kind}\ntemplates_dir: ../../t\n")
    (tmp_path / "job.yaml").write_text("name: a\nmodule: m\nimage: i\n")
    for escape in ESCAPES:
        template.write_text(escape.replace("PICKLE", PICKLE % mark).replace("MARK", str(mark)))
        if escape is ESCAPES[0]:  # the way of a person; the others by Python, which is quicker
            argv = [str(TOOLKIT), "check", "job.yaml", "--to=site"]
            done = subprocess.run(
                argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
            )
            assert done.returncode == 2, escape
        else:
            profile = toolkit.load_profile(str(folder / "site.yaml"))
            job = toolkit.load(tmp_path / "job.yaml")
            with pytest.raises(toolkit.RenderError):
                toolkit.render(toolkit.plan(job, profile))
        assert not mark.exists(), escape


def test_a_template_puts_no_other_file_into_a_script(tmp_path: Path) -> None:
    """A link in a cloned project could lead to a key of yours, and `submit` would send it."""
    secret = tmp_path / "secret"
    for file in (secret, tmp_path / "key.j2"):
        file.write_text("the key")
    folder = tmp_path / "t/local"
    folder.mkdir(parents=True)
    (folder / "key.j2").symlink_to(secret)
    (tmp_path / "t/.env").write_text("the key")
    (tmp_path / "t/.hidden.j2").write_text("the key")
    (folder / "key.txt").write_text("the key")
    (folder / "part.j2").write_text("part")
    (folder / "link.j2").symlink_to("part.j2")
    profile = toolkit.LocalProfile(name="l", templates_dir=str(tmp_path / "t"))
    made = toolkit.plan(toolkit.JobSpec(name="a", module="m"), profile)
    for include, message in [
        ("local/key.j2", "leads out of templates_dir"),
        ("local/../../key.j2", "template 'local/../../key.j2' does not exist"),
        ("local/key.txt", "template 'local/key.txt' does not exist; template names end in .j2"),
        (".env", "template '.env' does not exist; template names end in .j2"),
        (".hidden.j2", "template '.hidden.j2' does not exist"),
        (str(secret), f"template {str(secret)!r} does not exist"),
    ]:
        (folder / "run.sh.j2").write_text(f"{{% include '{include}' %}}")
        with pytest.raises(toolkit.RenderError, match=re.escape(message)):
            toolkit.render(made)
    (folder / "run.sh.j2").write_text("{% include 'local/link.j2' %}")
    assert toolkit.render(made) == "part"


def test_macros_of_another_file_are_called(tmp_path: Path) -> None:
    folder = tmp_path / "t/local"
    folder.mkdir(parents=True)
    (folder / "macros.j2").write_text("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}")
    (folder / "run.sh.j2").write_text(
        "{% import 'local/macros.j2' as m %}{% from 'local/macros.j2' import twice %}"
        "{{ m.twice('a') }}{{ twice('b') }}{{ job.name.rpartition('-')[2].zfill(3) }}"
    )
    profile = toolkit.LocalProfile(name="l", templates_dir=str(tmp_path / "t"))
    made = toolkit.plan(toolkit.JobSpec(name="a-7", module="m"), profile)
    assert toolkit.render(made) == "aabb007"
    (folder / "run.sh.j2").write_text("\n{{ '\\ud800' }}")
    with pytest.raises(toolkit.RenderError, match="which is not a character"):
        toolkit.render(made)


def test_all_points_of_a_sweep_share_a_limit(tmp_path: Path) -> None:
    folder = tmp_path / "t/kubernetes"
    folder.mkdir(parents=True)
    (folder / "pytorchjob.yaml.j2").write_text(
        "{% include 'toolkit/kubernetes/pytorchjob.yaml.j2' %}\n#{{ 'a' * 2000000 }}\n"
    )
    values = [str(value) for value in range(30)]
    job = toolkit.JobSpec(name="a", module="m", image="i", sweep={"grid": {"--lr": values}})
    profile = toolkit.KubernetesProfile(name="k", templates_dir=str(tmp_path / "t"))
    with pytest.raises(toolkit.RenderError, match=r"renders more than [\d,]+ characters"):
        toolkit.render(toolkit.plan(job, profile))


def test_a_mistake_has_its_line_whatever_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "t/local"
    folder.mkdir(parents=True)
    (folder / "run.sh.j2").write_text("a\n{{ nothing }}\n")
    (tmp_path / "x").mkdir()
    profile = toolkit.LocalProfile(name="l", templates_dir=f"{tmp_path}/x/../t")
    with pytest.raises(toolkit.RenderError, match=r"run\.sh\.j2:2: 'nothing' is undefined"):
        toolkit.render(toolkit.plan(toolkit.JobSpec(name="a", module="m"), profile))
