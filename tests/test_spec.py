"""The job file: what it may say, and every mistake in it named at once."""

import re
import string
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import toolkit
from toolkit.documents import read_document, write_document
from toolkit.errors import InputError, SpecError
from toolkit.fields import RESERVED_NAMES
from toolkit.quantities import format_duration, format_size
from toolkit.spec import JobSpec, Mount, NodeRange, Resources, Retries, Secret, Stop
from toolkit.validation import validate

ROOT = Path(__file__).parent.parent


def read(text: str) -> JobSpec:
    """Read a job file's text, as `load` does."""
    return validate(JobSpec, read_document(text, "job.yaml"), SpecError)


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(text)
    return str(caught.value)


def of_job(more: str) -> str:
    """Return why a job with `more` from its third line on is refused."""
    return refusal(f"name: a\nmodule: m\n{more}\n")


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
job.yaml:2: one of module, script and command says what to run; found module and script
job.yaml:2: 'LR' stands under env and under secrets; keep one
job.yaml:3: name: 'Digits' cannot be used; use at most 32 of a-z, 0-9 and '-', a letter first \
and no '-' last (Kubernetes allows no other names, and adds to this one)
job.yaml:5: script: '-c' would be read as an option of torchrun; write ./-c
job.yaml:6: args[1]: 10 is not a string to YAML; write "10"
job.yaml:6: args[2]: no is a boolean to YAML 1.1; write "no" if you mean the text
job.yaml:6: args[3]: must be a string, not a list
job.yaml:6: args[4]: must be a string, not a mapping
job.yaml:6: args[5]: 1e-3 is a number to YAML 1.2; write "1e-3" if you mean the text
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
job.yaml:23: env.Z: nothing is written here; write "" for an empty string
job.yaml:24: env.NIL: null is not a string to YAML; write "null"
job.yaml:25: env.NUL: '\\x00' holds a NUL byte, which no argument or variable can hold
job.yaml:26: the key 'LR' stands twice; the first is at job.yaml:19
job.yaml:27: stop.grace: '0s' is no time at all; write at least 1s
job.yaml:27: unknown key 'garce' under 'stop'; did you mean 'grace'?
job.yaml:29: retries.in_job: must be at least 0, not -1
job.yaml:30: retries.requeue: must be a whole number; yes is a boolean to YAML 1.1
job.yaml:33: secrets.LR.secret: 'My_Secret' cannot be used; write a Kubernetes object name
job.yaml:33: secrets.LR.key: '' cannot be used; use letters, digits, '-', '_' and '.'
job.yaml:34: secrets.HF: secret and key say where it is, or file does; found secret
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


# ---- What each key takes


FULL = """\
name: full
module: package.train
args: [--task, digits, --epochs, "10", "", "-1", "no"]
image: registry.example/train@sha256:0123
resources: {nnodes: 2, nproc_per_node: 8, gpus_per_node: 8, cpus_per_node: 96, memory: 64GiB, shm: 1500MB}
time_limit: 4:00:00
env: {LR: "1e-3", EMPTY: "", TEXT: !!str no}
stop: {grace: 2m}
retries: {in_job: 3, requeue: 2}
secrets: {WANDB_API_KEY: null, HF_TOKEN: {secret: hugging.face, key: token_1}}
mounts: [{source: /data, target: /data, read_only: true}, {source: claim:runs, target: /x}]
"""  # noqa: E501


def test_every_key_arrives_as_it_was_written() -> None:
    assert read(FULL) == JobSpec(
        name="full",
        module="package.train",
        args=("--task", "digits", "--epochs", "10", "", "-1", "no"),
        image="registry.example/train@sha256:0123",
        resources=Resources(
            nnodes=2,
            nproc_per_node=8,
            gpus_per_node=8,
            cpus_per_node=96,
            **{"memory": "64GiB", "shm": "1500MB"},
        ),
        **{"time_limit": "4h"},
        env={"LR": "1e-3", "EMPTY": "", "TEXT": "no"},
        stop=Stop(**{"grace": "120s"}),
        retries=Retries(in_job=3, requeue=2),
        secrets={"WANDB_API_KEY": None, "HF_TOKEN": Secret(secret="hugging.face", key="token_1")},
        mounts=(
            Mount(source="/data", target="/data", read_only=True),
            Mount(source="claim:runs", target="/x"),
        ),
    )
    job = read(FULL)
    assert (job.time_limit_s, job.stop.grace_s) == (14400, 120)
    assert (job.resources.memory_bytes, job.resources.shm_bytes) == (64 * 2**30, 1_500_000_000)
    assert [(mount.kind, mount.named) for mount in job.mounts] == [
        ("path", "/data"),
        ("claim", "runs"),
    ]


def test_a_job_needs_no_more_than_a_name_and_a_program() -> None:
    job = read("name: a\nmodule: m\n")
    assert job.as_written() == {"name": "a", "module": "m"}
    assert job.resources == Resources(nnodes=1, nproc_per_node=1, gpus_per_node=0)
    assert (job.time_limit_s, job.stop.grace_s) == (None, 60)
    assert (job.retries.in_job, job.retries.requeue) == (0, 0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("module: train", ("-m", "train", "x")),
        ("script: ./a b.py", ("./a b.py", "x")),
        ("command: [bash, -c, y]", ("--no-python", "bash", "-c", "y", "x")),
    ],
)
def test_the_program_stands_before_its_arguments(entry: str, words: tuple[str, ...]) -> None:
    assert read(f"name: a\n{entry}\nargs: [x]\n").entry == words


ONE_OF = "one of module, script and command says what to run; found"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("", f"job.yaml:1: {ONE_OF} none of them"),
        ("module: null", f"job.yaml:1: {ONE_OF} none of them"),
        ("module: m\nscript: s", f"job.yaml:1: {ONE_OF} module and script"),
        ("module: m\ncommand: [c]", f"job.yaml:1: {ONE_OF} module and command"),
        (
            "script: s\ncommand: [c]\nmodule: m",
            f"job.yaml:1: {ONE_OF} module and script and command",
        ),
        ("command: []", "job.yaml:1: command: the list is empty; name the program first"),
        ('command: [""]', "job.yaml:2: command: the program has no name; write its file"),
        ("command: bash", "job.yaml:2: command: must be a list, not 'bash'"),
        (
            "command: [-m, x]",
            "job.yaml:2: command: '-m' would be read as an option of torchrun; write ./-m",
        ),
        ('script: ""', "job.yaml:2: script: the program has no name; write its file"),
        (
            "module: train.py/",
            "job.yaml:2: module: 'train.py/' cannot be used; write it as after `python -m`, "
            "like train; a file goes under the key 'script'",
        ),
    ],
)
def test_a_job_runs_exactly_one_program(entries: str, message: str) -> None:
    assert refusal(f"name: a\n{entries}\n") == message


def test_a_key_set_to_nothing_is_as_good_as_left_out() -> None:
    spec = read("name: a\nmodule:\nscript: s\nimage:\ntime_limit: ~\nresources: {memory: null}\n")
    assert spec.as_written() == {"name": "a", "script": "s"}


@pytest.mark.parametrize(
    "name", ["a", "a1", "a-b", "x" * 32, "a" + "-" * 30 + "b"], ids=lambda name: f"{len(name)}"
)
def test_names_that_kubernetes_takes_are_taken(name: str) -> None:
    assert read(f"name: {name}\nmodule: m\n").name == name


@pytest.mark.parametrize(
    "name", ["A", "1a", "-a", "a-", "a_b", "a.b", "a b", "x" * 33, "é", '"a\\n"', '""', "'a/b'"]
)
def test_names_that_kubernetes_refuses_are_refused(name: str) -> None:
    shown = yaml.safe_load(name)
    assert refusal(f"name: {name}\nmodule: m\n") == (
        f"job.yaml:1: name: {shown!r} cannot be used; use at most 32 of a-z, 0-9 and '-', a letter "
        "first and no '-' last (Kubernetes allows no other names, and adds to this one)"
    )


AMBIGUOUS = {
    "no": "no is a boolean to YAML 1.1",
    "yes": "yes is a boolean to YAML 1.1",
    "on": "on is a boolean to YAML 1.1",
    "1e-3": "1e-3 is a number to YAML 1.2",
    "012": "012 is 10 to YAML 1.1 and 12 to YAML 1.2",
    "1_000": "1_000 is a number to YAML 1.1",
    "4:00:00": "4:00:00 is a number to YAML 1.1",
    "2001-01-01": "2001-01-01 is a date to YAML 1.1",
}
OTHER = ["0x1F", "~", "null", "true", "True", ".inf", ".nan", "3.10", "+1", "1e+3", "007", "0"]
PLACES = {
    "name": "name: {}\nmodule: m\n",
    "module": "module: {}\nname: a\n",
    "image": "image: {}\nname: a\nmodule: m\n",
    "args[0]": "args: [{}]\nname: a\nmodule: m\n",
    "command[1]": "command: [a, {}]\nname: a\n",
    "env.A": "env: {{A: {}}}\nname: a\nmodule: m\n",
    "mounts[0].source": "mounts: [{{source: {}, target: /a}}]\nname: a\nmodule: m\n",
    "secrets.A.key": "secrets: {{A: {{secret: s, key: {}}}}}\nname: a\nmodule: m\n",
}


@pytest.mark.parametrize("word", AMBIGUOUS)
@pytest.mark.parametrize("key", PLACES)
def test_a_word_that_is_no_string_to_every_yaml_is_refused_as_a_string(key: str, word: str) -> None:
    assert refusal(PLACES[key].format(word)) == (
        f'job.yaml:1: {key}: {AMBIGUOUS[word]}; write "{word}" if you mean the text'
    )


@pytest.mark.parametrize(
    "word", ["0x1F", "true", "True", ".inf", ".nan", "3.10", "+1", "0", "1.50"]
)
@pytest.mark.parametrize("key", PLACES)
def test_a_number_is_refused_as_a_string_and_its_own_spelling_offered(key: str, word: str) -> None:
    assert refusal(PLACES[key].format(word)) == (
        f'job.yaml:1: {key}: {word} is not a string to YAML; write "{word}"'
    )


@pytest.mark.parametrize("word", [*AMBIGUOUS, *OTHER, "="])
@pytest.mark.parametrize("style", ['"{}"', "'{}'", "!!str {}"])
def test_quoted_and_tagged_words_are_taken_as_strings(word: str, style: str) -> None:
    written = style.format(word)
    job = read(f"name: a\nmodule: m\nargs: [{written}]\nenv: {{A: {written}}}\n")
    assert (job.args, job.env) == ((word,), {"A": word})


def test_an_equals_sign_is_only_an_equals_sign() -> None:
    assert read("name: a\nmodule: m\nargs: [=]\n").args == ("=",)


@pytest.mark.parametrize("word", AMBIGUOUS)
def test_a_word_that_is_no_number_to_every_yaml_is_refused_as_a_number(word: str) -> None:
    assert of_job(f"resources: {{nnodes: {word}}}") == (
        f"job.yaml:3: resources.nnodes: must be a whole number; {AMBIGUOUS[word]}"
    )


@pytest.mark.parametrize("word", ["true", "2.0", ".inf", "'2'", "two", "[2]", "", "~"])
def test_only_whole_numbers_are_numbers(word: str) -> None:
    shown = {"[2]": "a list", "two": "'two'", "": "nothing"}.get(word, word)
    assert of_job(f"resources: {{nnodes: {word}}}") == (
        f"job.yaml:3: resources.nnodes: must be a whole number, not {shown}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{min: 4, max: 2}", "resources.nnodes: min 4 is more than max 2"),
        ("{min: 0, max: 2}", "resources.nnodes.min: must be at least 1, not 0"),
        ("{min: '1', max: 2}", "resources.nnodes.min: must be a whole number, not '1'"),
        ("{max: 2}", "the key 'resources.nnodes.min' is missing"),
        ("{min: 1, max: 2, mx: 3}",
         "unknown key 'mx' under 'resources.nnodes'; did you mean 'max'?"),
    ],
)  # fmt: skip
def test_a_range_of_nodes_has_two_ends(text: str, message: str) -> None:
    assert of_job(f"resources: {{nnodes: {text}}}") == f"job.yaml:3: {message}"


def test_a_range_of_nodes_is_written_as_it_was_read() -> None:
    made = read("name: a\nmodule: m\nresources: {nnodes: {min: 2, max: 4}}\n")
    assert made.resources == Resources(nnodes=NodeRange(min=2, max=4))
    assert made.as_written()["resources"] == {"nnodes": {"min": 2, "max": 4}}


def test_hexadecimal_numbers_are_numbers() -> None:
    assert read("name: a\nmodule: m\nresources: {nnodes: 0x1F}\n").resources.nnodes == 31


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("env: [a]", "env: must be a mapping of keys to values, not a list"),
        ("env: 3", "env: must be a mapping of keys to values, not 3"),
        ("env:", "env: must be a mapping of keys to values, not nothing"),
        ("args: foo", "args: must be a list, not 'foo'"),
        ("args: {a: b}", "args: must be a list, not a mapping"),
        ("args: [[a]]", "args[0]: must be a string, not a list"),
        ("args: [null]", 'args[0]: null is not a string to YAML; write "null"'),
        ("args: [x, ]\nimage: [a]", "image: must be a string, not a list"),
        ("resources: 3", "resources: must be a mapping of keys to values, not 3"),
        ("resources: [a]", "resources: must be a mapping of keys to values, not a list"),
        ("resources: yes",
         "resources: must be a mapping of keys to values; yes is a boolean to YAML 1.1"),
        ("stop: 60s", "stop: must be a mapping of keys to values, not '60s'"),
        ("retries: 3", "retries: must be a mapping of keys to values, not 3"),
        ("mounts: {source: /a}", "mounts: must be a list, not a mapping"),
        ("mounts: [3]", "mounts[0]: must be a mapping of keys to values, not 3"),
        ("secrets: A",
         "secrets: must be a list of names, or a mapping of names to places, not 'A'"),
        ("secrets: 1", "secrets: must be a list of names, or a mapping of names to places, not 1"),
        ("secrets: {A: b}", "secrets.A: must be a mapping of keys to values, not '***'"),
        ("time_limit: [4h]", "time_limit: must be a string with a unit, not a list"),
        ("time_limit: 1.5", "time_limit: must be a string with a unit, not 1.5"),
        ("time_limit: true", "time_limit: must be a string with a unit, not true"),
        ("time_limit: 90", "time_limit: '90' has no unit; write 90s, 90m or 90h"),
        ("time_limit: 030", "time_limit: '030' has no unit; write 030s, 030m or 030h"),
        ("resources: {memory: 1e9}",
         "resources.memory: '1e9' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("stop: {grace: }", "stop.grace: must be a string with a unit, not nothing"),
        ("mounts: [{source: /a, target: /a, read_only: 1}]",
         "mounts[0].read_only: must be true or false, not 1"),
    ],
)  # fmt: skip
def test_wrong_types_are_refused_at_every_level(more: str, message: str) -> None:
    assert of_job(more) == f"job.yaml:{2 + more.count(chr(10)) + 1}: {message}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("image_: x", "unknown key 'image_'; did you mean 'image'?"),
        ("resources: {gpus: 3}",
         "unknown key 'gpus' under 'resources'; did you mean 'gpus_per_node'?"),
        ("stop: {x: 3}", "unknown key 'x' under 'stop'; valid are grace"),
        ("retries: {inJob: 3}", "unknown key 'inJob' under 'retries'; did you mean 'in_job'?"),
        ("secrets: {A: {secret: s, key: k, value: v}}",
         "unknown key 'value' under 'secrets.A'; valid are secret, key, file"),
        ("mounts: [{source: /a, target: /a, readOnly: true}]",
         "unknown key 'readOnly' under 'mounts[0]'; did you mean 'read_only'?"),
        ("time_limit_s: 4h", "unknown key 'time_limit_s'; did you mean 'time_limit'?"),
        ("resources: {shm_bytes: 4GB}",
         "unknown key 'shm_bytes' under 'resources'; valid are nnodes, nproc_per_node, "
         "gpus_per_node, cpus_per_node, memory, shm"),
        ('"\\0": x', "unknown key '\\x00'; valid are name, module, script, command, args, image, "
         "workdir, resources, time_limit, env, stop, retries, secrets, sbatch, mounts, "
         "kubernetes, sweep, "
         "after"),
    ],
)  # fmt: skip
def test_unknown_keys_are_refused_at_every_level(more: str, message: str) -> None:
    assert of_job(more) == f"job.yaml:3: {message}"


@pytest.mark.parametrize("word", ["no", "012", "1", "~", "null", "true", "2001-01-01", "1.5"])
def test_words_that_are_no_strings_are_refused_as_names_of_variables(word: str) -> None:
    reason = f'as a key, {AMBIGUOUS.get(word)}; write "{word}" if you mean the text'
    if word not in AMBIGUOUS:
        reason = f'the key {word} is not a string; write "{word}"'
    assert of_job(f"env:\n  {word}: x").splitlines()[0] == f"job.yaml:4: {reason}"


@pytest.mark.parametrize("char", ["\\0", "\\x00"])
def test_nul_bytes_are_refused(char: str) -> None:
    assert of_job(f'env: {{A: "x{char}"}}\nargs: ["{char}"]').splitlines() == [
        "job.yaml:3: env.A: 'x\\x00' holds a NUL byte, which no argument or variable can hold",
        "job.yaml:4: args[0]: '\\x00' holds a NUL byte, which no argument or variable can hold",
    ]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="half a surrogate pair, which is not text"):
        JobSpec(name="a", module="m", args=("\ud800",))


# ---- Variables, secrets and mounts


@pytest.mark.parametrize(
    "name", ["PET_NNODES", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "TRAIN_RUN_DIR", "TRAIN_ATTEMPT"]
)
@pytest.mark.parametrize("more", ["env: {{{0}: x}}", "secrets: [{0}]", "secrets: {{{0}: null}}"])
def test_names_that_the_toolkit_sets_are_refused(name: str, more: str) -> None:
    key = more.partition(":")[0]
    assert of_job(more.format(name)) == (
        f"job.yaml:3: {key}.{name}: {name!r} is set by torchrun, the scheduler or the toolkit; "
        "leave it out"
    )


def test_every_variable_that_torchrun_gives_its_workers_is_reserved() -> None:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    agent = Path(found.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    (block,) = re.findall(r"worker_env = \{\n(.*?)\n +\}\n", agent.read_text(), re.DOTALL)
    names = set(re.findall(r'^ +"([A-Z_]+)":', block, re.MULTILINE)) | {"LOCAL_RANK"}
    assert len(names) > 12
    # torchrun takes this one from its own environment where it finds it there.
    kept = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert {name for name in names if not RESERVED_NAMES.fullmatch(name)} == kept


def test_names_beside_the_reserved_ones_are_free() -> None:
    names = ["RANKS", "MY_RANK", "SLURM", "PET", "TRAIN_RUN_DIRS", "OMP_NUM_THREADS", "_", "a1"]
    job = JobSpec(name="a", module="m", env=dict.fromkeys(names, "x"))
    assert list(job.env) == names


@pytest.mark.parametrize("secrets", ["[B, A]", "{A: null, B: {secret: s, key: k}}"])
def test_a_variable_is_public_or_secret(secrets: str) -> None:
    assert of_job(f"env: {{A: x, B: y, C: z}}\nsecrets: {secrets}").splitlines() == [
        "job.yaml:1: 'A' stands under env and under secrets; keep one",
        "job.yaml:1: 'B' stands under env and under secrets; keep one",
    ]


def test_secrets_are_names_or_places() -> None:
    listed = read("name: a\nmodule: m\nsecrets: [A, B]\n")
    assert listed.secrets == {"A": None, "B": None}
    assert listed == read("name: a\nmodule: m\nsecrets: {A: , B: null}\n")
    assert of_job("secrets:\n- 1\n- no\n- A\n- A\n- [x]") == (
        "job.yaml:3: secrets: a name is wanted, not 1; a name is wanted, not ('x',); no is a "
        "boolean to YAML 1.1; write \"no\" if you mean the text; 'A' stands twice"
    )
    assert of_job("secrets: [a-b]") == (
        "job.yaml:3: secrets.a-b: 'a-b' cannot be used; "
        "use letters, digits and underscores, no digit first"
    )


@pytest.mark.parametrize(
    "source",
    [
        *("data", "./data", "~/data", "", "claim:", "claim:A", "Claim:a", "claim:a/b", "pvc:a"),
        *("configmap:", "secret:A", "secret:-a", "nfs:server", "nfs:server:data", "nfs::/data"),
        *("nfs:a b:/data", "nfs:$(x):/data", "nfs:h#:/data", "empty", "empty:10", "empty:lots"),
    ],
)
def test_a_mount_has_an_absolute_source_or_a_volume_of_kubernetes(source: str) -> None:
    assert of_job(f"mounts:\n- source: '{source}'\n  target: /data") == (
        f"job.yaml:4: mounts[0].source: {source!r} must be an absolute path; on Kubernetes also "
        "claim:NAME, configmap:NAME, secret:NAME, nfs:SERVER:/PATH, empty: or empty:10GiB"
    )


@pytest.mark.parametrize(
    "source",
    [
        *("/a", "claim:a", "configmap:a.b", "secret:a-b", "nfs:10.0.0.1:/x y/$(z)"),
        *("nfs:[fd00::1]:/x", "nfs:files.example.com:/", "empty:", "empty:10GiB"),
    ],
)
def test_a_mount_keeps_its_source_as_it_was_written(source: str) -> None:
    (mount,) = read(f"name: a\nmodule: m\nmounts: [{{source: '{source}', target: /d}}]\n").mounts
    assert mount.source == source
    assert (mount.kind, mount.named) == (
        ("path", source) if source == "/a" else tuple(source.split(":", 1))
    )


@pytest.mark.parametrize("target", ["data", "./data", "~/data", "claim:a", ""])
def test_a_mount_has_an_absolute_target(target: str) -> None:
    assert of_job(f"mounts:\n- source: /data\n  target: '{target}'") == (
        f"job.yaml:5: mounts[0].target: {target!r} must be an absolute path; "
        "it is the same on every node"
    )


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
         "job.yaml:2: the key 'b' stands twice; the first is at job.yaml:2"),
    ],
)  # fmt: skip
def test_a_file_holds_one_mapping(text: str, message: str) -> None:
    assert refusal(text) == message


def test_problems_of_the_yaml_come_with_those_of_the_job() -> None:
    assert refusal("name: A\nname: b\nmodule: m\nimage: x\nimage: y\n").splitlines() == [
        "job.yaml:1: name: 'A' cannot be used; use at most 32 of a-z, 0-9 and '-', a letter first "
        "and no '-' last (Kubernetes allows no other names, and adds to this one)",
        "job.yaml:2: the key 'name' stands twice; the first is at job.yaml:1",
        "job.yaml:5: the key 'image' stands twice; the first is at job.yaml:4",
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


# ---- --set

BASE = 'name: a\nmodule: m\nargs: [x, "1"]\nresources: {nnodes: 2, memory: 1GiB}\nenv: {A: b}\n'


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
        ("stop.x.y=4", "unknown key 'x' under 'stop'; valid are grace"),
        ("resource.nnodes=4", "unknown key 'resource'; did you mean 'resources'?"),
        ("resources.nnodes=1_0",
         "resources.nnodes: must be a whole number; 1_0 is a number to YAML 1.1"),
        ("resources.nnodes=0x0", "resources.nnodes: must be at least 1, not 0x0"),
        ("resources.nnodes=", "resources.nnodes: must be a whole number, not nothing"),
        ("resources.nnodes=[", "not YAML: did not find expected node content"),
        ("resources.nnodes=\udcff", "the character U+DCFF, which not every reader of YAML takes"),
        ("resources={nnodes: 2, nnodes: 3}",
         "the key 'nnodes' stands twice; the first is at --set resources={nnodes: 2, nnodes: "
         "3}"),
        ("env={A: 3.10}", 'env.A: 3.10 is not a string to YAML; write "3.10"'),
        ("env.X=\udcff", "env.X: '\\udcff' holds half a surrogate pair, which is not text"),
        ("env.RANK=0",
         "env.RANK: 'RANK' is set by torchrun, the scheduler or the toolkit; leave it out"),
        ("args=foo", "args: must be a list, not 'foo'"),
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


# ---- Frozen, and the same whatever the formatting


def test_a_job_cannot_be_changed() -> None:
    job = read(FULL)
    for part, name in [(job, "name"), (job.resources, "nnodes"), (job.mounts[0], "source")]:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(part, name, 3)


REWRITTEN = """\
# The same, otherwise written.
secrets: {HF_TOKEN: {key: "token_1", secret: 'hugging.face'}, "WANDB_API_KEY": null}
mounts:
- read_only: True
  target: "/data"
  source: /data
- {target: /x, source: "claim:runs", read_only: false}
retries: {requeue: 2, in_job: 0x3}
stop: {grace: 120s}
env:
  TEXT: 'no'
  EMPTY: ''
  LR: !!str 1e-3
time_limit: 0-04:00:00
resources:
  shm: 1.5GB
  memory: 65536MiB
  cpus_per_node: 96
  gpus_per_node: 8
  nproc_per_node: 8
  nnodes: 2
image: "registry.example/train@sha256:0123"
args:
- --task
- digits
- --epochs
- '10'
- ""
- "-1"
- 'no'
module: package.train
name: full
script:
"""


def test_the_digest_does_not_depend_on_order_and_formatting() -> None:
    assert read(REWRITTEN) == read(FULL)
    assert read(REWRITTEN).digest == read(FULL).digest


def test_the_digest_is_the_same_tomorrow() -> None:
    """It stands in committed examples, so a change of it is a change for users."""
    assert read("name: a\nmodule: m\n").digest == "719e169834ef"
    assert read(FULL).digest == "5a83e9b46ff2"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: full", "name: full2"),
        ("module: package.train", "script: package.train"),
        ("--task, digits", "digits, --task"),
        ('"10", ""', '"10"'),
        ("sha256:0123", "sha256:0124"),
        ("nnodes: 2", "nnodes: 3"),
        ("nproc_per_node: 8", "nproc_per_node: 4"),
        ("gpus_per_node: 8", "gpus_per_node: 9"),
        ("cpus_per_node: 96", "cpus_per_node: 95"),
        ("memory: 64GiB", "memory: 64GB"),
        ("shm: 1500MB", "shm: 1500MiB"),
        ("time_limit: 4:00:00", "time_limit: 4:00:01"),
        ('LR: "1e-3"', 'LR: "1e-4"'),
        ('EMPTY: "", ', ""),
        ("grace: 2m", "grace: 2.01m"),
        ("in_job: 3", "in_job: 2"),
        ("requeue: 2", "requeue: 3"),
        ("WANDB_API_KEY: null,", ""),
        ("WANDB_API_KEY: null,", "WANDB_API_KEY: {secret: s, key: k},"),
        ("key: token_1", "key: token_2"),
        ("source: /data", "source: /dat"),
        ("target: /data", "target: /dat"),
        (", read_only: true", ""),
    ],
)
def test_the_digest_changes_with_everything_that_means_something(old: str, new: str) -> None:
    assert FULL.count(old) == 1
    assert read(FULL.replace(old, new)).digest != read(FULL).digest


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TRICKY = st.sampled_from(
    ["", "no", "1e-3", "0E0", "012", "~", "=", "<<", "null", "2001-01-01", "4:00", " a", "a ", "-"]
) | st.sampled_from(
    ["a\nb", "\u2028", "\x85", "\ufeff", "\x07", "é", "a: b", "# c", "'", '"', "{{", "%", "\t"]
)
TEXT = TEXTS | TRICKY
ENV_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: not RESERVED_NAMES.fullmatch(name)
)
SIZES = st.integers(1, 2**52).map(format_size)
DURATIONS = st.integers(1, 10**7).map(format_duration)
PATHS = TEXT.map(lambda text: f"/{text}")
SECRET_NAMES = st.from_regex(r"[a-z0-9]([-.a-z0-9]{0,9}[a-z0-9])?", fullmatch=True)
SECRETS = st.fixed_dictionaries(
    {"secret": SECRET_NAMES, "key": st.from_regex(r"[-._a-zA-Z0-9]{1,9}", fullmatch=True)}
) | st.fixed_dictionaries({"file": st.sampled_from(["/etc/key", "~/.secrets/it's a"])})
SBATCH = st.fixed_dictionaries(
    {},
    optional={
        "comment": st.text(string.printable[:95], min_size=1) | st.integers(1, 10**9) | st.none(),
        "exclusive": st.just(True) | st.none() | st.just("user"),
        "hold": st.just(True),
    },
)
NATURAL, POSITIVE = st.integers(0, 10**9), st.integers(1, 10**9)
PROGRAMS = TEXT.map(lambda text: f"./{text}")


def maybe(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings with any of these keys."""
    return st.fixed_dictionaries({}, optional=keys)


ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {"module": st.from_regex(r"[a-zA-Z_]\w{0,5}(\.[a-z_]\w{0,5})?", fullmatch=True)}
    ),
    st.fixed_dictionaries({"script": PROGRAMS}),
    st.fixed_dictionaries(
        {"command": st.tuples(PROGRAMS, st.lists(TEXT, max_size=2)).map(lambda c: [c[0], *c[1]])}
    ),
)
JOBS = st.builds(
    lambda entry, name, rest: {"name": name} | entry | rest,
    ENTRIES,
    st.from_regex(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True),
    maybe(
        args=st.lists(TEXT, max_size=4),
        image=st.from_regex(r"[a-z0-9/:.@]{1,12}", fullmatch=True),
        resources=maybe(
            nnodes=POSITIVE,
            nproc_per_node=POSITIVE,
            gpus_per_node=NATURAL,
            cpus_per_node=POSITIVE,
            memory=SIZES,
            shm=SIZES,
        ),
        time_limit=DURATIONS,
        env=st.dictionaries(ENV_NAMES.map(lambda name: f"A{name}"), TEXT, max_size=3),
        stop=maybe(grace=DURATIONS),
        retries=maybe(in_job=NATURAL, requeue=NATURAL),
        secrets=st.dictionaries(
            ENV_NAMES.map(lambda name: f"B{name}"), st.none() | SECRETS, max_size=3
        ),
        sbatch=SBATCH,
        mounts=st.lists(
            st.fixed_dictionaries(
                {
                    "source": PATHS | SECRET_NAMES.map(lambda name: f"claim:{name}"),
                    "target": PATHS,
                },
                optional={"read_only": st.booleans()},
            ),
            max_size=2,
        ),
    ),
)


@settings(deadline=None, max_examples=150)
@given(data=JOBS)
@example(data={"name": "a", "module": "m", "env": {"A": "a\u2028b\x85c"}})
def test_a_job_written_down_is_read_as_the_same_job(data: dict[str, Any]) -> None:
    job = JobSpec.model_validate(data)
    again = read(write_document(job.as_written()))
    assert (again, again.digest) == (job, job.digest)
    assert JobSpec.model_validate(job.as_written()) == job
    assert yaml.safe_load(write_document(job.as_written())) == job.as_written()


# ---- The committed job files


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_job_files_load(path: Path) -> None:
    assert toolkit.load(path).name == path.stem
