"""Secrets in files are found, and never shown."""

import doctest
import subprocess
from pathlib import Path

import pytest

import toolkit
import toolkit.job.spec
from tests.conftest import TOOLKIT
from tests.fakes import fake_slurm
from toolkit.errors import InputError, LauncherError, PlanError, ProfileError
from toolkit.runs.records import run_directory
from toolkit.runs.records.run_secrets import redacted, require_secrets
from toolkit.text import secret_scan

LETTERS = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0xF"
HEX = "0123456789abcdef" * 2 + "01234567"

REFUSED = {
    "hugging face": ("LOGIN", f"hf_{LETTERS}"),
    "github": ("X", f"ghp_{LETTERS}abcd"),
    "github, fine-grained": ("X", f"github_pat_{LETTERS}_{LETTERS}"),
    "gitlab": ("X", f"glpat-{LETTERS[:20]}"),
    "aws": ("AWS_ACCESS_KEY_ID", "AKIA" + "ABCD2345EFGH6789"),
    "openai": ("X", f"sk-{LETTERS}{LETTERS[:16]}"),
    "openai, of a project": ("X", f"sk-proj-{LETTERS}-{LETTERS}"),
    "anthropic": ("X", f"sk-ant-api03-{LETTERS}"),
    "slack": ("X", f"xoxb-1234567890-{LETTERS[:12]}"),
    "google": ("X", f"AIza{LETTERS}abc"),
    "web token": ("X", f"eyJ{LETTERS}.eyJ{LETTERS}.{LETTERS}"),
    "private key": ("X", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"),
    "private key, encrypted": ("X", "-----BEGIN RSA PRIVATE KEY-----"),
    "inside a text": ("HEADERS", f"Authorization: Bearer hf_{LETTERS}"),
    "wandb": ("WANDB_API_KEY", HEX),
    "hex key": ("COMET_KEY", HEX),
    "hex token": ("MY_TOKEN", HEX),
    "password": ("DB_PASSWORD", "hunter2"),
    "short password": ("PGPASSWORD", "abc"),
    "number as a password": ("DB_PASSWORD", "12345678"),
    "passwd": ("MYSQL_PASSWD", "hunter2"),
    "secret": ("MY_SECRET", "correct horse"),
    "secret key": ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"),
    "secret in the middle": ("APP_SECRET_VALUE", "correct"),
    "api key": ("OPENAI_API_KEY", "abc123"),
    "one word": ("APIKEY", "abc123"),
    "camel case": ("apiKey", "abc123"),
    "lower case": ("hf_token", "abcdefgh"),
    "token": ("HF_TOKEN", "abcdefgh"),
    "token first": ("TOKEN_HUB", "abcdefgh"),
    "address": ("DATABASE", "postgres://me:hunter2@db/runs"),
}
"""Variables that hold a secret: the kind of secret, name and value."""

PASSED = {
    "tokenizers": ("TOKENIZERS_PARALLELISM", "false"),
    "tokenizer": ("TOKENIZER", "meta-llama/Llama-3"),
    "count of tokens": ("MAX_TOKENS", "4096"),
    "length": ("MAX_TOKEN_LEN", "long"),
    "switch": ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
    "pad": ("PAD_TOKEN", "pad"),
    "special": ("UNKNOWN_TOKEN", "<unk>"),
    "number": ("STREAM_TOKEN", "50256"),
    "path": ("HF_TOKEN", "/run/secrets/hf"),
    "path of a file": ("HF_TOKEN_PATH", "hf.txt"),
    "home": ("API_KEY", "~/.key"),
    "relative path": ("API_KEY", "./key"),
    "reference": ("HF_TOKEN", "$HF_TOKEN"),
    "braces": ("HF_TOKEN", "${HF_TOKEN}"),
    "vault": ("DB_PASSWORD", "vault:secret/db"),
    "placeholder": ("API_KEY", "<your key>"),
    "empty": ("HF_TOKEN", ""),
    "nothing": ("DB_PASSWORD", "none"),
    "name of a secret": ("SECRET_NAME", "wandb"),
    "file": ("PASSWORD_FILE", "pw"),
    "identity": ("TOKEN_ID", "abcdefgh"),
    "keyboard": ("KEYBOARD", "qwerty"),
    "monkey": ("MONKEY", "abc"),
    "keys of a dictionary": ("LABEL_KEY", "label"),
    "commit": ("GIT_COMMIT", HEX),
    "digest": ("IMAGE", f"a@sha256:{HEX}"),
    "scikit": ("MODEL", "sk-learn-random-forest-2024-11-digits"),
    "task": ("NAME", "task-0123456789abcdefghijklmnop"),
    "underscore": ("NAME", "hf_models"),
    "word": ("NAME", "shf_0123456789abcdefghijklmn"),
    "public key": ("X", "-----BEGIN PUBLIC KEY-----"),
    "address": ("TRACKING", "https://wandb.example.com:8080/api"),
    "secretary": ("SECRETARY", "Ann"),
    "compass": ("COMPASS", "north"),
}
"""Variables that look a little like it."""


def job(**keys: object) -> toolkit.JobSpec:
    return toolkit.JobSpec.model_validate({"name": "probe", "module": "train", **keys})


@pytest.mark.parametrize("name", REFUSED)
def test_a_secret_in_env_is_refused_without_being_shown(name: str) -> None:
    variable, value = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        toolkit.plan(job(env={variable: value}), toolkit.SlurmProfile(name="s"))
    message = str(caught.value)
    assert message.startswith(f"env.{variable} holds what looks like ")
    assert "secrets: {NAME: {file: ~/.secrets/name}}" in message
    assert value not in message
    assert value[:4] not in message.replace(variable, "")


@pytest.mark.parametrize("name", PASSED)
def test_what_only_looks_a_little_like_a_secret_passes(name: str) -> None:
    variable, value = PASSED[name]
    assert secret_scan.kind_of(value, name=variable) is None
    toolkit.plan(job(env={variable: value}), toolkit.SlurmProfile(name="s"))


@pytest.mark.parametrize(
    ("args", "at"),
    [
        (["--token", f"hf_{LETTERS}"], 1),
        ([f"--hub.token=hf_{LETTERS}"], 0),
        (["--api-key", "abc123"], 1),
        (["--wandb-api-key=abc123"], 0),
        (["trainer.password=hunter2"], 0),
        (["-x", "--hub-token", LETTERS], 2),
    ],
)
def test_a_secret_among_the_arguments_is_refused(args: list[str], at: int) -> None:
    ((path, reason),) = toolkit.job.spec.leaked_secrets(job(args=args))
    assert path == ("args", at)
    assert reason.startswith(f"args[{at}] holds what looks like ")
    assert not any(word in reason for word in ("abc123", "hunter2", LETTERS))


@pytest.mark.parametrize(
    "args",
    [
        ["--tokens", "4096", "--token-dropout", "0.1"],
        ["--eos-token", "</s>", "--pad-token", "pad"],
        ["--token", "word"],
        ["--api-key-file", "key.txt", "--password=$PW"],
        ["--password"],
        ["secret", "password"],
        ["--model", "sk-learn", "--lr=1e-3"],
    ],
)
def test_arguments_of_a_training_pass(args: list[str]) -> None:
    assert toolkit.job.spec.leaked_secrets(job(args=args)) == []


def test_a_file_with_secrets_is_refused_at_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: a\nmodule: m\nargs: [--token, hf_{LETTERS}]\n"
        f"env:\n  WANDB_API_KEY: '{HEX}'\nsbatch: {{comment: ghp_{LETTERS}}}\n"
    )
    with pytest.raises(InputError) as caught:
        toolkit.load(path)
    lines = str(caught.value).splitlines()
    assert [line.split(" holds ")[0] for line in lines] == [
        f"{path}:3: args[1]",
        f"{path}:5: env.WANDB_API_KEY",
        f"{path}:6: sbatch.comment",
    ]
    assert HEX not in str(caught.value)
    assert LETTERS not in str(caught.value)


@pytest.mark.parametrize(
    "assignment",
    [
        "env.DB_PASSWORD=hunter2",
        f"env.X=hf_{LETTERS}",
        "secrets.DB_PASSWORD=hunter2",
        "secrets.A=hunter2",
        f"args=hf_{LETTERS}",
        f"nonsense.x=hf_{LETTERS}",
        f"name=hf_{LETTERS}",
    ],
)
def test_no_message_shows_what_is_set(assignment: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nmodule: m\n")
    with pytest.raises(InputError) as caught:
        toolkit.load(path, [assignment])
    assert "hunter2" not in str(caught.value)
    assert LETTERS not in str(caught.value)
    assert str(caught.value).startswith(f"--set {assignment.partition('=')[0]}=")


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("env: {HF_TOKEN: abcdefgh}", "env.HF_TOKEN"),
        (f"sbatch: {{comment: hf_{LETTERS}}}", "sbatch.comment"),
        ("prolog: ['true', 'export DB_PASSWORD=\"hunter2\"']", "prolog[1][1]"),
        (f"epilog: ['curl -H hf_{LETTERS} x']", "epilog[0][2]"),
    ],
)
def test_a_profile_holds_no_secret_either(line: str, at: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"kind: slurm\n{line}\n")
    with pytest.raises(ProfileError) as caught:
        toolkit.load_profile(str(path))
    assert str(caught.value).startswith(f"{path}:2: {at} holds what looks like ")
    assert not any(word in str(caught.value) for word in ("abcdefgh", "hunter2", LETTERS))


def test_the_commands_refuse_and_show_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"name: a\nmodule: m\nenv: {{X: hf_{LETTERS}}}\n")
    for argv in (["check"], ["render", "--to=slurm"], ["submit", "--to=slurm"]):
        done = subprocess.run(
            [TOOLKIT, *argv, "job.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("job.yaml:3: env.X holds what looks like a Hugging Face")
        assert LETTERS not in done.stderr


# ---- Files


@pytest.fixture(params=["slurm", "local"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def script(kind: str, file: str) -> str:
    profile = toolkit.SlurmProfile(name="s") if kind == "slurm" else toolkit.LocalProfile(name="l")
    return toolkit.render(toolkit.plan(job(secrets={"KEY_A": {"file": file}}), profile))


def test_a_secret_is_read_from_its_file_when_the_script_runs(kind: str, tmp_path: Path) -> None:
    key = tmp_path / "my 'keys'" / "a"
    key.parent.mkdir()
    key.write_text("line 1 $HOME `x`\nline 2\n\n")
    key.chmod(0o600)
    text = script(kind, "~/my 'keys'/a")
    assert "line 1" not in text
    (seen,) = fake_slurm.execute(text, tmp_path, nodes=1, run_dir=tmp_path / "run")
    assert seen.env["KEY_A"] == "line 1 $HOME `x`\nline 2"
    assert not any("line 1" in word for word in seen.argv)


@pytest.mark.parametrize(
    ("mode", "content", "reason"),
    [
        (0o644, "x", "others may read {}; chmod 600 it"),
        (0o640, "x", "others may read {}; chmod 600 it"),
        (0o604, "x", "others may read {}; chmod 600 it"),
        (0o600, "", "{} is empty"),
        (None, "", "cannot read {}"),
    ],
)
def test_a_file_that_is_not_only_yours_stops_the_script(
    kind: str, mode: int | None, content: str, reason: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    if mode is not None:
        key.write_text(content)
        key.chmod(mode)
    environ = fake_slurm.install(tmp_path, nodes=1)
    path = tmp_path / "script.sh"
    path.write_text(script(kind, str(key)))
    argv = ["bash", "-x", str(path), str(tmp_path / "run")]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"probe: secret KEY_A: {reason.format(key)}" in done.stderr
    assert list((tmp_path / "dumps").iterdir()) == []


def test_a_traced_script_does_not_show_what_the_file_holds(kind: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("correct-horse")
    key.chmod(0o400)
    path = tmp_path / "script.sh"
    path.write_text(script(kind, str(key)))
    environ = fake_slurm.install(tmp_path, nodes=1)
    argv = ["bash", "-x", str(path), str(tmp_path / "run")]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"KEY_A={key}" in done.stderr  # the trace was on
    assert "correct-horse" not in done.stderr + done.stdout


def test_a_file_that_others_may_read_is_refused_before_submitting(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("x")
    made = toolkit.plan(
        job(secrets={"KEY_A": {"file": "~/key"}, "KEY_B": {"file": "/on/the/node/only"}}),
        toolkit.SlurmProfile(name="s"),
    )
    (tmp_path / "key").chmod(0o600)
    require_secrets(made, {"HOME": str(tmp_path)})
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(LauncherError, match=r"KEY_A: others may read .*/key; chmod 600 it"):
        require_secrets(made, {"HOME": str(tmp_path)})


def test_no_pod_sees_a_file_of_yours() -> None:
    profile = toolkit.KubernetesProfile(name="k")
    with pytest.raises(PlanError, match="'KEY_A' is in a file, which pods cannot see; write"):
        toolkit.plan(job(image="i", secrets={"KEY_A": {"file": "/key"}}), profile)


# ---- What passes through


def test_known_values_are_taken_out_of_logs(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----\n0123456789abcdefghij\n")
    spec = job(secrets={"LOGIN": None, "SHORT": None, "KEY_A": {"file": str(tmp_path / "key")}})
    run_directory.write_inputs(tmp_path, spec, script="", file_name="run.sh")
    environ = {"LOGIN": "me:abcdef", "SHORT": "1", "HF_TOKEN": "tok-123", "HOME": "/home/me"}
    lines = ["login me:abcdef 1", "hub tok-123 at /home/me", "x 0123456789abcdefghij"]
    assert list(redacted(iter(lines), tmp_path, environ)) == [
        "login ***LOGIN*** 1",
        "hub ***HF_TOKEN*** at /home/me",
        "x ***KEY_A***",
    ]
    assert list(redacted(iter(lines), None, environ))[:2] == [
        lines[0],
        "hub ***HF_TOKEN*** at /home/me",
    ]


@pytest.mark.slow
def test_a_local_run_that_prints_its_secret_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGIN", "correct-horse")
    spec = toolkit.JobSpec(
        name="probe", command=("sh", "-c", 'echo "I am $LOGIN"; exit 3'), secrets={"LOGIN": None}
    )
    run = toolkit.submit(spec, to=toolkit.LocalProfile(name="l", runs_dir=str(tmp_path)))
    run.wait(300)
    text = "\n".join(run.logs())
    assert "I am ***LOGIN***" in text
    assert "correct-horse" not in text


def test_an_error_of_the_scheduler_does_not_show_a_secret(tmp_path: Path) -> None:
    done = subprocess.run(
        [TOOLKIT, "status", "slurm://s/tok-1234567"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_TOKEN": "tok-1234567"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("no run 'slurm://s/***HF_TOKEN***'")


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(secret_scan).failed == 0
