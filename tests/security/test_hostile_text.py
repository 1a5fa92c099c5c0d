"""What others wrote reaches a terminal without a character that it would obey or hide.

In each place that a message can quote stands the same text. Of each command, both streams are
looked at.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from tests.support.terminal import Terminal
from toolkit.cli.main import main
from toolkit.errors import LauncherError
from toolkit.text.control import for_terminal, printable

HOSTILE = "\x1b]0;pwn\x07\x1b[8m\x9b31m\r\u202e\u061c\u200b\ufeff\u2028\U000e0041x"


def yaml_of(value: object) -> str:
    """Return a value as JSON that is YAML, which knows no pairs of surrogates."""
    return json.dumps(value).replace("\\udb40\\udc41", "\\U000e0041")


NAME = HOSTILE + "\nFORGED"
"""The text for names of files, which may have lines."""

FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\U000e0000-\U000e0fff]"
)

Toolkit = Callable[..., str]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Toolkit:
    """Call a command in this process, and return what it has printed, which must be harmless."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["toolkit", *(os.fspath(word) for word in words)])
        try:
            main()
            status: Any = 0
        except SystemExit as end:
            status = end.code
        out, err = capfdbinary.readouterr()
        shown = (out + err).decode(errors="replace")
        assert status in (0, 1, 2), shown
        assert not FORBIDDEN.findall(shown), (words, shown)
        assert not re.search("^FORGED", shown, re.MULTILINE), (words, shown)
        return shown

    return call


# ---- Files of a project


def documents(schema: dict[str, Any], fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield documents with the text as each key's value, as a key, and within lists."""
    yield {**fixed, HOSTILE: HOSTILE}
    for key, about in schema["properties"].items():
        for value in (HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}, [{HOSTILE: HOSTILE}]):
            yield {**fixed, key: value}
        reference = about.get("$ref") or next(
            (one["$ref"] for one in about.get("anyOf", ()) if "$ref" in one), ""
        )
        inner = schema.get("$defs", {}).get(reference.rpartition("/")[2], {})
        for below in inner.get("properties", {}):
            for value in (HOSTILE, {HOSTILE: HOSTILE}):
                yield {**fixed, key: {below: value}}


def test_each_key_of_a_job_file(command: Toolkit) -> None:
    quoted = 0
    for document in documents(toolkit.json_schema(), {"name": "a", "module": "m"}):
        Path("job.yaml").write_text(yaml_of(document))
        shown = command("check", "job.yaml", "--to=slurm", "--to=k8s")
        command("check", "--json", "job.yaml")
        command("render", "job.yaml", "--to=local")
        quoted += "pwn" in shown
    assert quoted > 50


def test_each_key_of_a_profile(command: Toolkit) -> None:
    Path("job.yaml").write_text("name: a\nmodule: m\nimage: i\n")
    quoted = 0
    models = toolkit.profile_schema()["$defs"]
    for kind in ("local", "slurm", "kubernetes"):
        schema = {**models[f"{kind.title()}Profile"], "$defs": models}
        for document in documents(schema, {"kind": kind}):
            Path("p.yaml").write_text(yaml_of(document))
            quoted += "pwn" in command("render", "job.yaml", "--to=./p.yaml")
    assert quoted > 100


def manifests() -> Iterator[dict[str, Any]]:
    """Yield manifests with the text in each place, one place at a time."""
    container = {
        "name": "main",
        "image": "i",
        "command": ["torchrun"],
        "env": [{"name": "A", "value": "b"}],
        "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "1"}},
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    }
    pod = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [container], "volumes": [{"name": "v", "emptyDir": {}}]},
    }
    role = {"replicas": 1, "restartPolicy": "Never", "template": pod}
    for whole in (
        {"apiVersion": "v1", "kind": "Pod", **pod},
        {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": pod}},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "spec": {"pytorchReplicaSpecs": {"Master": role}},
        },
    ):
        text = json.dumps({**whole, "metadata": {"name": "a", "labels": {"a": "b"}}})
        for found in re.finditer(r'"[^"]*"', text):
            yield json.loads(text[: found.start()] + json.dumps(HOSTILE) + text[found.end() :])


def test_each_place_of_a_manifest(command: Toolkit) -> None:
    quoted = 0
    for manifest in manifests():
        Path("m.yaml").write_text(yaml_of(manifest))
        quoted += "pwn" in command("check", "m.yaml")
        command("check", "m.yaml", "--json")
    assert quoted > 20


SCRIPTS = [
    "#SBATCH --no{}=3\nsrun x",
    "#SBATCH --nodes={}\nsrun x",
    "#SBATCH --{}\nsrun torchrun x.py",
    "#SBATCH --nodes=2\nexport A{}=1\nsrun torchrun --nnodes={} --rdzv-endpoint={} {}",
    "#SBATCH --nodes=2\nsrun {} torchrun --{}=1 x.py",
    "#SBATCH --gres={}\nsrun torchrun --nproc-per-node={} x.py\nMASTER_ADDR={}",
    "#SBATCH --output={}/x\nmkdir {}\nif {}; then",
    "#SBATCH --nodes=2\n# toolkit: allow {}\nsrun x",
]


def test_each_place_of_a_batch_script(command: Toolkit) -> None:
    quoted = 0
    for script in SCRIPTS:
        Path("x.sbatch").write_text("#!/bin/bash\n" + script.replace("{}", HOSTILE))
        quoted += "pwn" in command("check", "x.sbatch")
        command("check", "x.sbatch", "--json")
    assert quoted >= 2


def test_a_training_script(command: Toolkit) -> None:
    code = "import os, torch.distributed as dist\nos.environ[{0}] = {0}\ndist.{1}\n"
    for text in (code.format(ascii(HOSTILE), "x"), HOSTILE, f'"{HOSTILE}', f"# {HOSTILE}\nif"):
        Path("t.py").write_text(text)
        command("check", "t.py")


def test_names_of_files_and_folders(command: Toolkit) -> None:
    folder = Path(f"d{NAME}")
    folder.mkdir()
    texts = {
        "sbatch": "#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n",
        "yaml": "name: a\nmodule: m\nbad: 1\n",
        "py": "import torch\nif",
    }
    for end, text in texts.items():
        path = folder / f"{NAME}.{end}"
        path.write_text(text)
        assert "pwn" in command("check", path)
    for words in (["check", folder], ["check", folder, "--json"], ["check", folder / "missing"]):
        assert "pwn" in command(*words)
    good = folder / f"good{NAME}.yaml"
    good.write_text("name: a\nmodule: m\nscript: null\n")
    command("check", good)
    command("render", good, "--to=slurm")
    command("render", good, f"--to={folder}/p{NAME}.yaml")
    command("new", folder / f"new{NAME}")
    command("new", folder)
    command("init", "--kind=local", "--output", folder / f"init{NAME}.yaml")
    command("init", "--kind=local", "--output", folder / f"init{NAME}.yaml")


def test_words_of_the_command_line(command: Toolkit) -> None:
    """A hostile file's name becomes one by `toolkit check *`."""
    Path("job.yaml").write_text("name: a\nmodule: m\n")
    for words in (
        [f"--{NAME}"],
        [NAME],
        ["check", f"--{NAME}"],
        ["status", NAME],
        ["logs", NAME],
        ["render", "job.yaml", f"--to={NAME}"],
        ["render", "job.yaml", "--to=slurm", f"--set={NAME}"],
        ["render", "job.yaml", "--to=slurm", f"--set=a.{HOSTILE}=1"],
        ["logs", "--grep=(" + HOSTILE, "x"],
        ["schema", NAME],
    ):
        assert "pwn" in command(*words) or "x" in words


# ---- Runs of others


def run_directory(folder: Path) -> Path:
    """Make a run directory that has the text wherever a file may hold text."""
    attempt = folder / "logs/attempt-0"
    attempt.mkdir(parents=True)
    now = 1.7e9
    told = {key: HOSTILE for key in ("state", "reason", "message", "node", "error", "event")}
    launch = {
        **{"version": 1, "uri": "local://x", "name": "x", "job": HOSTILE, "created": now},
        **{"profile": {"kind": "local", "name": HOSTILE, "price": {"currency": HOSTILE}}},
        "provenance": {"git": {"commit": HOSTILE, "branch": HOSTILE, "diff": HOSTILE}},
    }
    (folder / "launch.json").write_text(json.dumps(launch))
    (folder / "outcome.json").write_text(
        json.dumps({**told, "status": "fatal", "attempt": 0, "step": 3, "time": now})
    )
    (folder / "job.yaml").write_text(f"name: {yaml_of(HOSTILE)}\n")
    metrics = {"step": 1, "time": now, "loss": 0.5, HOSTILE: HOSTILE, f"m{HOSTILE}": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (folder / "events.jsonl").write_text(
        json.dumps({**told, "event": "start", "time": now, "packages": {HOSTILE: HOSTILE}}) + "\n"
    )
    (attempt / "reason").write_text(f"fatal: {HOSTILE}\n")
    (attempt / "exit_status").write_text("1\n")
    (attempt / "nodes").write_text(f"{HOSTILE}\n")
    log = f"[rank 0] {HOSTILE}\nTraceback (most recent call last):\n  {HOSTILE}\nError: {HOSTILE}\n"
    report = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-28_10:00:00\n"
        f"  host      : {HOSTILE}\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 1)\n"
        f"  error_file: {HOSTILE}\n  traceback : {HOSTILE}\n----\n"
    )
    (attempt / "node-0.log").write_text((log + report).replace("\r", ""))  # a progress bar's
    (attempt / f"node-{NAME.replace('/', '')}.log").write_text("x\n")
    (attempt / "stalls.jsonl").write_text(json.dumps({"time": now, "ranks": [told], **told}) + "\n")
    return folder


COMMANDS = ["status", "logs", "show", "goodput", "stacks", "cancel", "wait", "resubmit"]


@pytest.mark.parametrize("words", COMMANDS)
def test_the_run_directory_of_another_user(command: Toolkit, words: str) -> None:
    folder = run_directory(Path.cwd() / f"run{NAME}")
    command(words, folder)
    if words not in ("logs", "resubmit"):
        command(words, folder, "--json")


def test_the_report_is_named_harmlessly(command: Toolkit) -> None:
    folder = run_directory(Path.cwd() / f"run{NAME}")
    assert "written: " in command("report", folder)
    assert "written: " in command("report", folder, "-o", Path(f"r{NAME}.html"))


def test_a_folder_that_is_not_named_in_utf_8_gets_its_report(command: Toolkit) -> None:
    folder = run_directory(Path(os.fsdecode(b"run-\xff")).absolute())
    assert "written: " in command("report", folder)
    assert "<title>" in command("report", folder, "-o", "-")


# ---- How


def test_colours_of_a_log_stay_but_nothing_is_hidden_in_a_message() -> None:
    assert for_terminal("\x1b[32mgreen") == "\x1b[32mgreen\x1b[0m"
    assert printable("\x1b[8mhidden\rfine") == "\\x1b[8mhidden\\rfine"
    assert printable("a\u200cb\u200dc\td\ne") == "a\u200cb\u200dc\td\ne"
    assert FORBIDDEN.search(printable(HOSTILE)) is None


def test_a_script_is_exact_in_a_pipe_and_harmless_at_a_terminal(
    tmp_path: Path, command: Toolkit
) -> None:
    template = tmp_path / "t/local/run.sh.j2"
    template.parent.mkdir(parents=True)
    template.write_text("#!/bin/bash\n# \x1b]0;pwn\x07\n")
    (tmp_path / "p.yaml").write_text("kind: local\ntemplates_dir: t\n")
    (tmp_path / "job.yaml").write_text("name: a\nmodule: m\n")
    argv = [TOOLKIT, "render", tmp_path / "job.yaml", "--to", tmp_path / "p.yaml"]
    terminal = Terminal(list(map(str, argv)))
    assert terminal.status() == 0
    assert terminal.read() == "#!/bin/bash\r\n# \\x1b]0;pwn\\x07\r\n"


def test_commands_print_by_one_module() -> None:
    drawers = {"output.py", "operation_line.py", "screen.py", "live.py"}
    for path in sorted((ROOT / "toolkit/cli").glob("*.py")):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = {ast.unparse(call.func) for call in calls}
        assert path.name in drawers or not names & {"click.echo", "print", "click.secho"}, path


def test_an_error_is_one_line_for_each_problem() -> None:
    problem = toolkit.errors.Problem(message="a\nFORGED", place="b\nFORGED")
    assert str(problem) == "b\\nFORGED: a\\nFORGED"
    assert str(LauncherError("what sbatch says\nin two lines")).count("\n") == 1
