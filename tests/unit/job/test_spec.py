"""The job file: what a text must be to be one, and every mistake in it named at once."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
from tests.support.job_texts import read, refusal
from toolkit.errors import InputError
from toolkit.job.spec import JobSpec

ROOT = Path(__file__).parents[3]


BIG = """\
# Everything that can be wrong, on 40 lines.
nmae: digits
name: Digits
module: train
script: -c
args: [--epochs, 10, no, [x], {y: z}, 1e-3]
image: my image
resources:
  nnode: 2
  nnodes: 0
  nproc_per_node: "8"
  gpus_per_node: 1_000
  cpus_per_node: 2.0
  memory: 64
  shm: 1G
  memory_bytes: 64GiB
time_limit: 1:30
env:
  LR: 3.10
  RANK: "0"
  A-B: x
  ON: on
  Z:
  NIL: null
  NUL: "\\0"
  LR: again
stop: {grace: 0s, garce: 1s}
retries:
  in_job: -1
  requeue: yes
secrets:
  TOKEN:
  LR: {secret: My_Secret, key: ""}
  HF: {secret: hf}
mounts:
- /data
- {source: data, target: here, read_only: "true"}
- {sorce: /a}
- <<: {source: /a}
  target: /a
timelimit: 4h
"""

BIG_PROBLEMS = """\
job.yaml:2: unknown key 'nmae'; did you mean 'name'?
job.yaml:2: give one of module, script and command; found module and script
job.yaml:2: 'LR' is in both env and secrets: keep one
job.yaml:3: name: 'Digits' cannot be used; use at most 32 of a-z, 0-9 and '-', a letter first \
and no '-' last (Kubernetes allows no other names, and adds to this one)
job.yaml:5: script: '-c' would be read as an option of torchrun; write ./-c
job.yaml:6: args[2]: no is a boolean to YAML 1.1; write "no" if you mean the text
job.yaml:6: args[3]: must be a string, not a list
job.yaml:6: args[4]: must be a string, not a mapping
job.yaml:7: image: 'my image' cannot be used; write it like registry/name:tag
job.yaml:9: unknown key 'nnode' under 'resources'; did you mean 'nnodes'?
job.yaml:10: resources.nnodes: must be at least 1, not 0
job.yaml:11: resources.nproc_per_node: must be a whole number, not '8'
job.yaml:12: resources.gpus_per_node: must be a whole number; 1_000 is a number to YAML 1.1
job.yaml:13: resources.cpus_per_node: must be a whole number, not 2.0
job.yaml:14: resources.memory: '64' has no unit; write it like 64GiB or 64MiB
job.yaml:15: resources.shm: '1G' is 1GiB to Slurm and 1GB to Kubernetes; write the one you mean
job.yaml:16: unknown key 'memory_bytes' under 'resources'; did you mean 'memory'?
job.yaml:17: time_limit: '1:30' is minutes:seconds to Slurm and hours:minutes to people; write \
it like 1h30m or 01:30:00
job.yaml:19: env.LR: 3.10 is not a string to YAML; write "3.10"
job.yaml:20: env.RANK: 'RANK' is set by torchrun, the scheduler or the toolkit; leave it out
job.yaml:21: env.A-B: 'A-B' cannot be used; use letters, digits and underscores, no digit first
job.yaml:22: as a key, ON is a boolean to YAML 1.1; write "ON" if you mean the text
job.yaml:22: env.ON: on is a boolean to YAML 1.1; write "on" if you mean the text
job.yaml:23: env.Z: the value is missing; write "" for an empty string
job.yaml:24: env.NIL: null is not a string to YAML; write "null"
job.yaml:25: env.NUL: '\\x00' holds a NUL byte, which no argument or variable can hold
job.yaml:26: duplicate key 'LR'; the first is at job.yaml:19
job.yaml:27: stop.grace: '0s' is not longer than zero; write at least 1s
job.yaml:27: unknown key 'garce' under 'stop'; did you mean 'grace'?
job.yaml:29: retries.in_job: must be at least 0, not -1
job.yaml:30: retries.requeue: must be a whole number; yes is a boolean to YAML 1.1
job.yaml:33: secrets.LR.secret: 'My_Secret' cannot be used; write a Kubernetes object name
job.yaml:33: secrets.LR.key: '' cannot be used; use letters, digits, '-', '_' and '.'
job.yaml:34: secrets.HF: give secret and key, or file; found secret
job.yaml:36: mounts[0]: must be a mapping of keys to values, not '/data'
job.yaml:37: mounts[1].source: 'data' must be an absolute path; on Kubernetes also claim:NAME, \
configmap:NAME, secret:NAME, nfs:SERVER:/PATH, empty: or empty:10GiB
job.yaml:37: mounts[1].target: 'here' must be an absolute path; it is the same on every node
job.yaml:37: mounts[1].read_only: must be true or false, not 'true'
job.yaml:38: the key 'mounts[2].source' is missing
job.yaml:38: the key 'mounts[2].target' is missing
job.yaml:38: unknown key 'sorce' under 'mounts[2]'; did you mean 'source'?
job.yaml:39: merge keys (<<) are not read; write the keys out
job.yaml:39: the key 'mounts[3].source' is missing
job.yaml:41: unknown key 'timelimit'; did you mean 'time_limit'?
"""


def test_every_mistake_of_a_file_is_reported_at_once_with_its_line() -> None:
    assert refusal(BIG) + "\n" == BIG_PROBLEMS


# ---- Files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: the file is empty"),
        ("# nothing\n", "job.yaml: the file is empty"),
        ("---\n", "job.yaml:2: the file is empty"),
        ("- name: a\n", "job.yaml:1: the file is not a mapping of keys to values"),
        ("name\n", "job.yaml:1: the file is not a mapping of keys to values"),
        ("\n[a, {b: 1, b: 2}]\n", "job.yaml:2: the file is not a mapping of keys to values\n"
         "job.yaml:2: duplicate key 'b'; the first is at job.yaml:2"),
    ],
)  # fmt: skip
def test_a_file_holds_one_mapping(text: str, message: str) -> None:
    assert refusal(text) == message


def test_problems_of_the_yaml_come_with_those_of_the_job() -> None:
    assert refusal("name: A\nname: b\nmodule: m\nimage: x\nimage: y\n").splitlines() == [
        "job.yaml:1: name: 'A' cannot be used; use at most 32 of a-z, 0-9 and '-', a letter first "
        "and no '-' last (Kubernetes allows no other names, and adds to this one)",
        "job.yaml:2: duplicate key 'name'; the first is at job.yaml:1",
        "job.yaml:5: duplicate key 'image'; the first is at job.yaml:4",
    ]


KEYS = st.sampled_from(
    [
        "name",
        "module",
        "args",
        "env",
        "secrets",
        "mounts",
        "resources",
        "nnodes",
        "time_limit",
        "<<",
    ]
)
PIECES = KEYS | st.sampled_from(
    [
        "\n",
        "\n  ",
        "\n- ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "&a ",
        "*a",
        "!!str ",
        "!",
        "|\n",
        "'",
        '"',
    ]
)
WORDS = st.sampled_from(
    ["a", "m", "no", "012", "1e3", "~", "4:0:0", "%", "@", "? ", "\\", "\0", "9" * 20]
)


@pytest.mark.parametrize(
    "word",
    ["3", "-3", "0.01", "3.10", "1e-3", "1.5e3", "1E+5", "+1", "0", "0.0", "9" * 30, "0x1F"],
)
def test_numbers_in_args_are_taken_as_they_are_written(tmp_path: Path, word: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: a\nmodule: m\nargs: [--x, {word}]\n")
    assert toolkit.load(file).args == ("--x", word)
    assert toolkit.load(file, [f"args.0={word}"]).args == (word, word)
    assert toolkit.load(file, [f"args=[{word}, b]"]).args == (word, "b")


@pytest.mark.parametrize(
    "word", ["on", "yes", "0777", "1_000", "12:30", "~", "null", "true", "0o17", "", "010", ".inf"]
)
def test_words_that_yaml_versions_read_differently_are_refused_in_args(word: str) -> None:
    with pytest.raises(InputError, match='write "'):
        read(f"name: a\nmodule: m\nargs:\n- --x\n- {word}\n")


def test_python_numbers_in_args_are_taken_as_text() -> None:
    job = read("name: a\nmodule: m\nargs: [--lr, 0.10]")
    assert job.replace(args=["--lr", 0.2, "--epochs", 3]).args == ("--lr", "0.2", "--epochs", "3")


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES | WORDS | st.text(max_size=3), max_size=25).map("".join))
def test_any_text_is_a_job_or_is_refused_with_its_place(text: str) -> None:
    try:
        job = read(f"name: a\nmodule: m\n{text}")
    except InputError as error:
        assert all(re.fullmatch(r"job\.yaml:[0-9]+", p.place or "") for p in error.problems)
        assert len(error.problems) > 0
    else:
        assert job == JobSpec.model_validate(job.as_written())


# ---- The committed job files


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_job_files_load(path: Path) -> None:
    assert toolkit.load(path).name == path.stem
