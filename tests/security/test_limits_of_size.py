"""A file beyond reason is refused before it is read whole, and work grows with size, not faster.

Work is counted in calls, of Python and of C, and never in seconds.
"""

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import toolkit
from toolkit.errors import InputError, RenderError
from toolkit.lint.bash.ast import WordPart, joined
from toolkit.lint.bash.parser import read_script
from toolkit.lint.check import check_manifests, check_script
from toolkit.lint.scripts.options import read_directives
from toolkit.lint.scripts.values import Values
from toolkit.rendering import templates_dir
from toolkit.text import manifests, yaml_reader
from toolkit.text.yaml_reader import Document, read_document, read_text

SIZE = 5_000_000
LIMIT = "at most 5,000,000 bytes are read; is that the right file?"


def said(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    return str(caught.value)


# ---- Files that are read


def sparse(path: Path) -> Path:
    path.touch()
    os.truncate(path, 20 << 30)
    return path


def test_a_file_that_is_too_large_is_refused_with_its_size(tmp_path: Path) -> None:
    file = sparse(tmp_path / "job.yaml")
    assert said(lambda: read_text(file)) == f"{file}: has 21,474,836,480 bytes, and {LIMIT}"
    file.write_bytes(b"#" * SIZE)
    assert read_text(file) == "#" * SIZE
    file.write_bytes(b"#" * (SIZE + 1))
    assert said(lambda: read_text(file)) == f"{file}: has 5,000,001 bytes, and {LIMIT}"


def test_a_device_without_an_end_is_refused(tmp_path: Path) -> None:
    zero = Path("/dev/zero")
    assert said(lambda: read_text(zero)) == f"/dev/zero: has no end in sight, and {LIMIT}"


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Make a pipe in which a process writes so many empty lines of comment."""
    monkeypatch.setattr(yaml_reader, "_streams", {})  # another test's pipe had the same number
    started: list[subprocess.Popen[bytes]] = []

    def make(count: int) -> Path:
        code = f"import sys; sys.stdout.write('#\\r\\n' * {count})"
        writer = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        started.append(writer)
        assert writer.stdout is not None
        return Path(f"/dev/fd/{writer.stdout.fileno()}")

    yield make
    for writer in started:
        assert writer.stdout is not None
        writer.stdout.close()
        writer.wait()


def test_a_pipe_is_read_up_to_the_limit_and_looked_at_twice(
    pipe: Callable[[int], Path],
) -> None:
    small = pipe(10)
    assert read_text(small) == read_text(small) == "#\n" * 10


def test_what_is_left_in_a_pipe_is_not_taken_for_a_file(pipe: Callable[[int], Path]) -> None:
    large = pipe(2_000_000)
    for _ in range(2):
        assert said(lambda: read_text(large)).endswith(LIMIT)


@pytest.mark.parametrize("name", ["job.yaml", "job.sbatch", "pods.yaml"])
def test_the_command_ends_with_one_line(tmp_path: Path, name: str) -> None:
    file = sparse(tmp_path / name)
    argv = [sys.executable, "-m", "toolkit", "check", str(file)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert f"{file}: has 21,474,836,480 bytes, and {LIMIT}\n" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_many_values_are_refused_before_a_tree_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compose(*arguments: Any, **named: Any) -> None:
        pytest.fail("a tree was made")

    monkeypatch.setattr("yaml.compose", compose)
    text = "a: [" + "1, " * 300_000 + "]\n"
    assert said(lambda: read_document(text, "job.yaml")) == ("job.yaml:1: more than 100000 values")


def test_a_script_of_very_many_lines_is_refused() -> None:
    text = "#!/bin/bash\n#SBATCH --time=1:00:00\n" + "true\n" * 20_000
    assert said(lambda: check_script(text, "x")) == "x: more than 20,000 lines; is it a script?"
    assert check_script(text[: -5 * 100], "x") == []


def test_of_very_many_problems_the_first_are_listed(tmp_path: Path) -> None:
    (tmp_path / "x.sbatch").write_text("#!/bin/bash\n" + "#SBATCH --nodse=2\n" * 3000)
    (tmp_path / "x.yaml").write_text("apiVersion: v1\nkind: Pod\n" + "---\n{}\n" * 100_000)
    (tmp_path / "job.yaml").write_text("name: a\n" + "".join(f"k{n}: 1\n" for n in range(3000)))
    for name, lines in [("x.sbatch", 1001), ("x.yaml", 1000), ("job.yaml", 1001)]:
        argv = [sys.executable, "-m", "toolkit", "check", name]
        done = subprocess.run(
            argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        shown = (done.stdout + done.stderr).splitlines()
        assert len(shown) == lines, shown[-2:]
        assert lines == 1000 or re.fullmatch(r"note: 2\d+ more .* are not shown", shown[-1])


# ---- How work grows


def calls(action: Callable[[], object]) -> int:
    """Count the calls that an action makes, each start of a generator again."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def grows(action: Callable[[int], object], size: int) -> float:
    """Return by how much the work grows from a size to its double."""
    action(size)  # builds what is cached, such as the table of rules
    return calls(lambda: action(2 * size)) / calls(lambda: action(size))


POD = """---
apiVersion: v1
kind: Pod
metadata: {name: p%d}
spec: {restartPolicy: Never, containers: [{name: a, image: "x:1", command: [sleep, "1"]}]}
"""
MANIFESTS = {
    "pods": POD,
    "services": "---\napiVersion: v1\nkind: Service\nmetadata: {name: s%d}\nspec: {}\n",
    "jobs": """---
apiVersion: batch/v1
kind: Job
metadata: {name: j%d}
spec:
  template:
    spec:
      restartPolicy: Never
      volumes: [{name: v, configMap: {name: c}}]
      containers: [{name: a, image: "x:1", command: [torchrun, train.py]}]
""",
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_work_on_manifests_is_linear_in_their_number(kind: str) -> None:
    def check(count: int) -> object:
        return check_manifests("".join(MANIFESTS[kind] % n for n in range(count)), "x")

    assert grows(check, 60) < 2.2


def test_each_character_of_a_stream_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0

    def read(text: str, source: str, **named: Any) -> Document:
        nonlocal parsed
        parsed += len(text)
        return read_document(text, source, **named)

    monkeypatch.setattr(manifests, "read_document", read)
    text = "".join(POD % n for n in range(300))
    stream = manifests.read_manifests(text, "x")
    assert parsed == len(text)
    # The lines are those of the file all the same.
    assert [one.place(()) for one in stream.manifests][::299] == ["x:2", f"x:{2 + 5 * 299}"]
    wrong = "---\nkind: A\n" * 3 + "---\na: {\n"
    assert "x:9: " in said(lambda: manifests.read_manifests(wrong.replace("\na: {", "\n- {"), "x"))


def test_items_of_a_list_stay_in_their_order() -> None:
    item = "- {apiVersion: v1, kind: ConfigMap, metadata: {name: c%d}}\n"
    text = "apiVersion: v1\nkind: List\nitems:\n" + "".join(item % n for n in range(50))
    found = manifests.read_manifests(text, "x").manifests
    assert [one.name for one in found] == [f"c{n}" for n in range(50)]


HEAD = "#!/bin/bash\n#SBATCH --nodes=2\nset -euo pipefail\n"
SCRIPTS = {
    "commands": "echo hello $USER >> log.txt\n",
    "steps": "srun torchrun --nnodes 2 train.py &\nwait\n",
    "variables": "v%d=1\n(X=1; echo $X)\ny=$(date)\n",
    "functions": "f%d() { if [ -f x ]; then exit 1; fi; }\n",
    "loops": "for i in 1 2; do case $x in a) python train.py;; esac; done # toolkit: allow x\n",
    "options": "#SBATCH --comment=x%d\n",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_work_on_a_script_is_linear_in_its_lines(kind: str) -> None:
    rows = SCRIPTS[kind]

    def check(count: int) -> object:
        body = "".join(rows % n if "%" in rows else rows for n in range(count))
        return check_script(HEAD + body, "x.sbatch")

    assert grows(check, 300) < 2.2


class Counted(str):
    """Text that counts the characters that are copied when another is added."""

    copied = 0

    def __add__(self, other: str) -> "Counted":
        Counted.copied += len(self) + len(other)
        return Counted(str(self) + other)


def test_the_lines_of_a_here_document_are_joined_at_once() -> None:
    script = read_script("cat <<EOF\n" + "a $x\nb\n" * 3 + "EOF\n", "x")
    body = script.commands[0].pipelines[0].nodes[0].redirections[0].body  # type: ignore[union-attr]
    assert [part.text for part in body] == ["a ", "x", "\nb\na ", "x", "\nb\na ", "x", "\nb\n"]
    Counted.copied = 0
    parts = [WordPart(kind="text", text=Counted("a"), line=1) for _ in range(1000)]
    assert [part.text for part in joined(parts)] == ["a" * 1000]
    assert Counted.copied == 0


def test_a_word_of_a_directive_is_joined_at_once() -> None:
    text = f"#SBATCH --comment='{'x' * 1000}' --nodes=2\n"
    (directive,) = read_directives(text)
    assert [o.value.text for o in directive.options if o.value] == ["x" * 1000, "2"]


def test_a_subshell_copies_no_more_variables_than_a_person_writes() -> None:
    text = "".join(f"v{n}=1\na{n}=(1)\n" for n in range(5000))
    values = Values()
    for item in read_script(text, "x").commands:
        for assignment in item.pipelines[0].nodes[0].assignments:  # type: ignore[union-attr]
            values.assign(assignment)
    assert len(values.scalars) == len(values.arrays) == 2000
    assert "v1999" in values.scalars  # the first ones


# ---- Templates of a folder

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def render(folder: Path, text: str) -> str:
    template = folder / "templates/slurm/train.sbatch.j2"
    template.parent.mkdir(parents=True, exist_ok=True)
    template.write_text(text)
    profile = toolkit.SlurmProfile(name="s", templates_dir=str(folder / "templates"))
    job = toolkit.JobSpec(name="a", module="train")
    return toolkit.render(toolkit.plan(job, profile))


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(RenderError) as caught:
        render(folder, text)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [LOOP, LOOP * 2, f"{{% macro m() %}}{LOOP}{{% endmacro %}}{{{{ m() }}}}"],
    ids=["loop", "loops", "macro"],
)
def test_a_template_that_never_ends_is_ended_in_any_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(templates_dir, "CPU_S", 1)
    place = tmp_path / "templates/slurm/train.sbatch.j2"
    expected = f"{place}:2: takes more than 1 s; is there a loop that never ends?"
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(refusal(tmp_path, f"first\n{text}")))
    thread.start()
    thread.join()
    assert answers == [expected]
    assert render(tmp_path, "{% for a in range(3) %}{{ a }}{% endfor %}") == "012"


DOUBLED = "{% set ns = namespace(x='a' * 4000000) %}{% for i in range(2000) %}\
{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
MEMORY = "takes more than 256 MiB of memory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ 'a' * 10 ** 9 }}", MEMORY),
        ("{{ [1] * 10 ** 9 }}", MEMORY),
        ("{{ '%3000000000d' % 1 }}", MEMORY),
        ("{{ '{:>3000000000}'.format(1) | length }}", MEMORY),
        ("{{ 'x' | center(3 * 10 ** 9) | length }}", MEMORY),
        (DOUBLED, MEMORY),
        ("{{ 10 ** (10 ** 9) }}", "takes more than 1 s; is there a loop that never ends?"),
        (
            "{{ (('a' * 4900000) | wordwrap(1)) | length }}",
            "takes more than 1 s; is there a loop that never ends?",
        ),
        ("{{ lipsum(n=100000) | length }}", "'lipsum' is undefined"),
        ("{% for a in range(9) %}{{ 'a' * 10 ** 6 }}{% endfor %}", "renders more than 5,000,000"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "takes more than 1 s"),
        ("{{ " + "(" * 100_000 + " }}", "RecursionError"),
    ],
    ids=lambda value: value[:30],
)
def test_a_template_that_takes_all_memory_or_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(templates_dir, "CPU_S", 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert message in refusal(tmp_path, text)
    most = max(before, 350 << 10)  # KiB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= most


def test_a_template_that_is_too_large_is_refused(tmp_path: Path) -> None:
    render(tmp_path, "a")
    sparse(tmp_path / "templates/slurm/train.sbatch.j2")
    job, folder = toolkit.JobSpec(name="a", module="train"), str(tmp_path / "templates")
    made = toolkit.plan(job, toolkit.SlurmProfile(name="s", templates_dir=folder))
    with pytest.raises(RenderError, match="has more than 5,000,000 bytes"):
        toolkit.render(made)
