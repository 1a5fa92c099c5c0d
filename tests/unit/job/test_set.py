"""`--set` changes one key of a job file; each mistake is reported with its option."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.support.job_texts import read
from toolkit.errors import SpecError
from toolkit.job.spec import JobSpec, Mount, Resources

BASE = 'name: a\nmodule: m\nargs: [x, "1"]\nresources: {nnodes: 2, memory: 1GiB}\nenv: {A: b}\n'
Load = Callable[..., JobSpec]
SetRefusal = Callable[..., str]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text from the file `job.yaml` with `--set` assignments."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str) -> JobSpec:
        Path("job.yaml").write_text(text)
        spec = toolkit.load("job.yaml", overrides)
        assert Path("job.yaml").read_text() == text
        return spec

    return load


@pytest.fixture
def set_refusal(load: Load) -> SetRefusal:
    def refusal(text: str, *overrides: str) -> str:
        with pytest.raises(SpecError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return refusal


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("name=b", {"name": "b"}),
        ("image=no", {"image": "no"}),
        ("image=1e-3", {"image": "1e-3"}),
        ("resources.nnodes=4", {"resources": {"nnodes": 4, "memory": "1GiB"}}),
        ("resources.memory=2GiB", {"resources": {"nnodes": 2, "memory": "2GiB"}}),
        ("resources={nproc_per_node: 3}", {"resources": {"nproc_per_node": 3}}),
        ("time_limit=4:00:00", {"time_limit": "4h"}),
        ("stop.grace=90s", {"stop": {"grace": "1m30s"}}),
        ("env.LR=1e-3", {"env": {"A": "b", "LR": "1e-3"}}),
        ("env.X=a=b", {"env": {"A": "b", "X": "a=b"}}),
        ("env.X=", {"env": {"A": "b", "X": ""}}),
        ("env.X='q'", {"env": {"A": "b", "X": "'q'"}}),
        ("env.X= [a]: {b}, #c ", {"env": {"A": "b", "X": " [a]: {b}, #c "}}),
        ("env.X=\u2028\x85\x07", {"env": {"A": "b", "X": "\u2028\x85\x07"}}),
        ("env={B: c}", {"env": {"B": "c"}}),
        ("args.0=5", {"args": ["5", "1"]}),
        ("args.1=null", {"args": ["x", "null"]}),
        ("args=[a, b]", {"args": ["a", "b"]}),
        ("args=[]", {"args": None}),
        ("secrets=[T]", {"secrets": {"T": None}}),
        ("secrets.T.secret=no", None),
        ("mounts=[{source: /a, target: /a}]", {"mounts": [{"source": "/a", "target": "/a"}]}),
    ],
)
def test_set_changes_one_key(load: Load, assignment: str, changed: dict[str, Any] | None) -> None:
    if changed is None:
        assignments = [assignment, "secrets.T.key=1"]
        changed = {"secrets": {"T": {"secret": "no", "key": "1"}}}
    else:
        assignments = [assignment]
    expected = read(BASE).as_written() | changed
    assert load(BASE, *assignments).as_written() == {
        key: value for key, value in expected.items() if value is not None
    }


def test_set_is_applied_in_order_and_the_last_wins(load: Load) -> None:
    job = load(
        BASE,
        "resources.nnodes=3",
        "resources={nproc_per_node: 5}",
        "resources.cpus_per_node=7",
        "resources.cpus_per_node=9",
        "env.B=1",
        "env.B=2",
    )
    assert job.resources == Resources(nproc_per_node=5, cpus_per_node=9)
    assert job.env == {"A": "b", "B": "2"}


def test_set_reaches_into_lists_of_the_file(load: Load) -> None:
    text = BASE + "mounts:\n- {source: /a, target: /a}\nsecrets: [S, T]\n"
    job = load(text, "mounts.0.target=/012", "mounts.0.read_only=true", "secrets.1=U")
    assert job.mounts == (Mount(source="/a", target="/012", read_only=True),)
    assert job.secrets == {"S": None, "U": None}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("resources.nnodes", "write it like resources.nnodes=4"),
        ("=4", "write it like resources.nnodes=4"),
        (".nnodes=4", "write it like resources.nnodes=4"),
        ("resources..nnodes=4", "write it like resources.nnodes=4"),
        ("args.2=x", "there is no 'args.2' to set in job.yaml"),
        ("args.-1=x", "there is no 'args.-1' to set in job.yaml"),
        ("args.x=x", "there is no 'args.x' to set in job.yaml"),
        ("command.0=x", "there is no 'command.0' to set in job.yaml"),
        ("name.x=x", "there is no 'name.x' to set in job.yaml"),
        ("env.0=x", "there is no 'env.0' to set in job.yaml"),
        ("resources.nnode=4", "unknown key 'nnode' under 'resources'; did you mean 'nnodes'?"),
        ("stop.x.y=4", "unknown key 'x' under 'stop'; valid are grace, protect_children"),
        ("resource.nnodes=4", "unknown key 'resource'; did you mean 'resources'?"),
        ("resources.nnodes=1_0",
         "resources.nnodes: must be a whole number; 1_0 is a number to YAML 1.1"),
        ("resources.nnodes=0x0", "resources.nnodes: must be at least 1, not 0x0"),
        ("resources.nnodes=", "resources.nnodes: must be a whole number, not nothing"),
        ("resources.nnodes=[", "not YAML: did not find expected node content"),
        ("resources.nnodes=\udcff", "the character U+DCFF, which not every reader of YAML accepts"),
        ("resources={nnodes: 2, nnodes: 3}",
         "duplicate key 'nnodes'; the first is at --set resources={nnodes: 2, nnodes: "
         "3}"),
        ("env={A: 3.10}", 'env.A: 3.10 is not a string to YAML; write "3.10"'),
        ("env.X=\udcff", "env.X: '\\udcff' holds half a surrogate pair, which is not text"),
        (".".join("a" * 2000) + "=1", "no key is 2000 levels deep"),
        ("args." + "1" * 5000 + "=x", f"there is no 'args.{'1' * 494}… to set in job.yaml"),
        ("env.RANK=0",
         "env.RANK: 'RANK' is set by torchrun, the scheduler or the toolkit; leave it out"),
        ("args=foo", 'args: must be a list, not \'foo\'; write a list: args: [--lr, "0.1"]'),
        ("stop={grace: 1}", "stop.grace: '1' has no unit; write 1s, 1m or 1h"),
    ],
)  # fmt: skip
def test_what_set_gets_wrong_names_the_option(
    set_refusal: SetRefusal, assignment: str, message: str
) -> None:
    assert set_refusal(BASE, assignment) == f"--set {assignment}: {message}"


def test_all_mistakes_of_the_file_and_of_set_come_together(set_refusal: SetRefusal) -> None:
    text = "name: A\nmodule: m\nresources: {nnodes: 0, memory: 1}\n"
    found = set_refusal(text, "resources.nnodes=x", "args.3=5", "name=b", "oops", "imag=x")
    assert found.splitlines() == [
        "--set args.3=5: there is no 'args.3' to set in job.yaml",
        "--set imag=x: unknown key 'imag'; did you mean 'image'?",
        "--set oops: write it like resources.nnodes=4",
        "--set resources.nnodes=x: resources.nnodes: must be a whole number, not 'x'",
        "job.yaml:3: resources.memory: '1' has no unit; write it like 1GiB or 1MiB",
    ]
