"""The keys of a job file: what each of them takes, and words that YAML reads in two ways."""

from pathlib import Path

import pydantic
import pytest
import yaml

from tests.support.job_texts import FULL, of_job, read, refusal
from toolkit.errors import SpecError
from toolkit.job.spec import JobSpec, Mount, NodeRange, Resources, Retries, Secret, Stop, load


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


ONE_OF = "give one of module, script and command; found"


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
        (
            "command: bash",
            "job.yaml:2: command: must be a list, not 'bash'; "
            "write a list: command: [python, -m, package]",
        ),
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
        ("args: foo", 'args: must be a list, not \'foo\'; write a list: args: [--lr, "0.1"]'),
        ("args: {a: b}", 'args: must be a list, not a mapping; write a list: args: [--lr, "0.1"]'),
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
        ("log_pattern: '('", "log_pattern: '(' is not a valid Python regular expression: missing "
         "), unterminated subpattern at position 0"),
        ("log_pattern: step", "log_pattern: 'step' has no group named step; write it like "
         r"'step (?P<step>\d+) .* loss (?P<loss>\S+)'"),
        ("log_pattern: (?P<step>.)(?P<time>.)", "log_pattern: the group name 'time' is reserved "
         "in metrics.jsonl; rename it"),
        ("stall_timeout: nevr", "stall_timeout: 'nevr' is not a time; write it like 90s, 30m, 4h, "
         "1h30m or 01:30:00, or 'never'"),
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
        ("gpus: 8", "unknown key 'gpus'; write resources: {gpus_per_node: …}"),
        ("nodes: 2", "unknown key 'nodes'; write resources: {nnodes: …}"),
        ("memory: 4GiB", "unknown key 'memory'; write resources: {memory: …}"),
        ("mem: 4GiB", "unknown key 'mem'; write resources: {memory: …}"),
        ("cpus-per-task: 4", "unknown key 'cpus-per-task'; write resources: {cpus_per_node: …}"),
        ("resources: {ntasks: 4}",
         "unknown key 'ntasks' under 'resources'; did you mean 'nproc_per_node'?"),
        ("resources: {time: 4h}",
         "unknown key 'time' under 'resources'; write time_limit: … beside 'resources'"),
        ("partition: gpu", "unknown key 'partition'; write it in a profile, which `toolkit init` "
         "makes and `--to` names"),
        ("stop: {x: 3}", "unknown key 'x' under 'stop'; valid are grace, protect_children"),
        ("retries: {inJob: 3}", "unknown key 'inJob' under 'retries'; did you mean 'in_job'?"),
        ("secrets: {A: {secret: s, key: k, value: v}}",
         "unknown key 'value' under 'secrets.A'; valid are secret, key, file"),
        ("mounts: [{source: /a, target: /a, readOnly: true}]",
         "unknown key 'readOnly' under 'mounts[0]'; did you mean 'read_only'?"),
        ("time_limit_s: 4h", "unknown key 'time_limit_s'; did you mean 'time_limit'?"),
        ("resources: {shm_bytes: 4GB}",
         "unknown key 'shm_bytes' under 'resources'; valid are nnodes, nproc_per_node, "
         "gpus_per_node, cpus_per_node, memory, shm"),
        ('"\\0": x', "unknown key '\\x00'; valid are version, name, module, script, command, args, "
         "image, workdir, resources, time_limit, env, stop, retries, start, stall_timeout, "
         "log_pattern, log_rank, notify, secrets, sbatch, mounts, kubernetes, sweep, after"),
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


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("command: [./train]", "start: warm forks Python, and command starts any program"),
        ("script: $TRAIN_RUN_DIR/call.py", "start: warm changes nothing, since torchrun forks"),
    ],
)
def test_warm_ranks_are_those_of_a_script_or_module(
    program: str, message: str, tmp_path: Path
) -> None:
    (path := tmp_path / "job.yaml").write_text(f"name: x\n{program}\nstart: warm\n")
    with pytest.raises(SpecError, match=message):
        load(path)


def test_log_rank_without_a_pattern_is_refused() -> None:
    message = "job.yaml:1: log_rank has no effect without log_pattern: set log_pattern too"
    assert of_job("log_rank: last") == message
