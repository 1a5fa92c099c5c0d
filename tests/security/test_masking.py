"""Secrets in output: the forms in which programs print them, today and tomorrow."""

import base64
import html
import importlib
import json
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import toolkit
from tests.security.fuzzing import guarded
from toolkit.runs.records import run_secrets
from toolkit.runs.records.run_secrets import require_secrets
from toolkit.text import secret_scan
from toolkit.text.secret_scan import Mask, marks_of

ODD = 'two "words" & a\\b\'s/é+'
PLAIN = "s3cr3t-of-mine"
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "json": json.dumps,
    "json, not ASCII": lambda value: json.dumps(value, ensure_ascii=False),
    "repr": repr,
    "url": lambda value: f"https://me:{urllib.parse.quote(value, safe='')}@host/",
    "query": lambda value: f"?token={urllib.parse.quote_plus(value)}&x=1",
    "html": html.escape,
    "hex": lambda value: value.encode().hex(),
    "HEX": lambda value: value.encode().hex().upper(),
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 of user and password": lambda v: base64.b64encode(f"me:{v}".encode()).decode(),
    "base64 of a line": lambda v: base64.b64encode(f"TOKEN={v}\nX=1\n".encode()).decode(),
    "base64 for URLs": lambda v: base64.urlsafe_b64encode(f"{v}???".encode()).decode(),
}


def left_of(value: str, shown: str) -> bool:
    """Whether anything of a value of six characters or more can be read, or decoded, in a text."""
    decoded = [shown, urllib.parse.unquote_plus(shown), html.unescape(shown)]
    return any(value[at : at + 6] in text for text in decoded for at in range(len(value) - 5))


@pytest.mark.parametrize("value", [ODD, PLAIN])
@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_hidden_as_programs_print_it(form: str, value: str) -> None:
    printed = f"login: {FORMS[form](value)} (said the server)"
    shown = Mask([("DB_PASSWORD", value)]).hide(printed)
    assert "***DB_PASSWORD***" in shown and not left_of(value, shown)
    assert shown.startswith("login: ") and shown.endswith(" (said the server)")


@pytest.mark.parametrize("value", [ODD, PLAIN])
@pytest.mark.parametrize("form", FORMS)
def test_a_value_that_is_no_longer_known_is_hidden_by_its_marks(form: str, value: str) -> None:
    mask = Mask([], list(marks_of("DB_PASSWORD", value, b"salt")))
    # In base64 the beginning is shared with what stands before: no place where a word begins.
    inside = form in ("base64 of user and password", "base64 of a line")
    shown = mask.hide(f"login: {FORMS[form](value)} (said the server)")
    assert inside or ("***DB_PASSWORD***" in shown and not left_of(value, shown))


@given(st.text(max_size=200), st.text(min_size=6, max_size=30))
def test_nothing_is_hidden_but_the_value(text: str, value: str) -> None:
    mask = Mask([("X", value)])
    shown = mask.hide(text)
    assert shown == text or "***X***" in shown
    assert value not in mask.hide(f"{text}{value}{text}").replace("***X***", "")


def test_marks_hold_nothing_of_the_value() -> None:
    for mark in marks_of("X", PLAIN, b"salt"):
        assert PLAIN[:3].encode() not in mark.digest
        assert mark.start < 2**16 and len(mark.digest) == 16
    assert list(marks_of("X", "short", b"salt")) == []


def test_texts_that_begin_like_a_secret_do_not_take_for_ever() -> None:
    mask = Mask([], list(marks_of("X", "prefix-and-more", b"salt")))
    with guarded():
        shown = mask.hide(" ".join(f"prefix{number:09}" for number in range(20_000)))
    # Not looked at any more: rather too much is hidden.
    assert shown.startswith("prefix000000000 ") and shown.endswith("***X***")


def test_logs_hide_tomorrow_what_was_exported_today(own_user: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("from-a-file-once\n")
    key.chmod(0o600)
    job = toolkit.JobSpec(
        name="a", module="m", secrets={"HF_TOKEN": None, "DB": {"file": str(key)}}
    )
    plan = toolkit.plan(job, toolkit.SlurmProfile(name="s"))
    environ = {"HOME": str(own_user), "XDG_STATE_HOME": str(own_user / "state")}
    require_secrets(plan, environ | {"HF_TOKEN": PLAIN})
    key.unlink()
    printed = f"token={PLAIN} and from-a-file-once {json.dumps({'a': PLAIN})}"
    for folder in (None, tmp_path):
        mask = run_secrets.mask_of(folder, environ)
        assert mask.hide(printed) == ('token=***HF_TOKEN*** and ***DB*** {"a": "***HF_TOKEN***"}')
    path = own_user / "state/torch-deploy-toolkit/masked.jsonl"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    assert PLAIN not in text and "from-a" not in text
    require_secrets(plan, environ | {"HF_TOKEN": PLAIN})
    assert path.read_text() == text  # once
    require_secrets(plan, environ | {"HF_TOKEN": "another-one"})
    shown = run_secrets.mask_of(None, environ).hide(f"another-one {PLAIN}")
    assert shown == "***HF_TOKEN*** ***HF_TOKEN***"


def test_odd_lines_among_the_marks_are_passed_over(own_user: Path) -> None:
    run_secrets.remember({"X": PLAIN})
    path = own_user / "state/torch-deploy-toolkit/masked.jsonl"
    good, odd = path.read_text().splitlines()[0], ["[]", "{", "\xff", "5"]
    values: dict[str, list[object]] = {
        "salt": ["", "zz", "00" * 65, None, 5, []],
        "digest": ["zz", None, {}],
        "length": [-1, 0, 1e300, "5", None, 10**30],
        "start": [-1, 2**16, "x", None],
        "name": [None, 5, []],
    }
    for key, bad in values.items():
        odd += (json.dumps(json.loads(good) | {key: value}) for value in bad)
    path.write_text("\n".join([*odd, good]))
    (found,) = run_secrets.stored_marks()
    assert found.length == len(PLAIN)
    assert run_secrets.mask_of(None).hide(f"a {PLAIN}") == "a ***X***"


def test_the_oldest_marks_are_forgotten(own_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_secrets, "_MOST", 20)
    for number in range(12):
        run_secrets.remember({"X": f"value-number-{number}"})
    mask = run_secrets.mask_of(None)
    assert len(run_secrets.stored_marks()) < 40
    assert mask.hide("value-number-11 value-number-0") == "***X*** value-number-0"


# ---- Where secrets are looked for

LETTERS = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0xF"
TOKEN = f"hf_{LETTERS}"
CONTAINER = {"containers": [{"name": "node", "env": [{"name": "HF_TOKEN", "value": "abcdefgh"}]}]}
PLACES: dict[str, tuple[str, dict[str, object]]] = {
    "image": ("image", {"image": f"registry.io/{TOKEN}/a:1"}),
    "workdir": ("workdir", {"workdir": f"/{TOKEN}"}),
    "mounts": ("mounts[0].source", {"mounts": [{"source": f"/{TOKEN}", "target": "/x"}]}),
    "merge": (
        "kubernetes.patches[0].merge.spec.template.spec.containers[0].env[0].value",
        {"kubernetes": {"patches": [{"merge": {"spec": {"template": {"spec": CONTAINER}}}}]}},
    ),
    "json": (
        "kubernetes.patches[0].json[0].value.value",
        {
            "kubernetes": {
                "patches": [
                    {
                        "json": [
                            {
                                "op": "add",
                                "path": "/spec/env/-",
                                "value": {"name": "DB_PASS", "value": "hunter2"},
                            }
                        ]
                    }
                ]
            }
        },
    ),
    "json, by its path": (
        "kubernetes.patches[0].json[0].value",
        {
            "kubernetes": {
                "patches": [
                    {"json": [{"op": "add", "path": "/metadata/DB_PASS", "value": "hunter2"}]}
                ]
            }
        },
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_secret_is_found_wherever_a_job_file_holds_it(name: str, tmp_path: Path) -> None:
    place, keys = PLACES[name]
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"name": "a", "module": "m", **keys}))
    with pytest.raises(toolkit.ToolkitError) as caught:
        toolkit.load(path)
    assert f"{place} holds what looks like " in str(caught.value)
    assert not {LETTERS, "abcdefgh", "hunter2"} & set(str(caught.value).split("'"))


@pytest.mark.parametrize(
    "line",
    [
        f"kind: slurm\nmodules: [a, {TOKEN}]\n",
        f"kind: slurm\nvenv: /{TOKEN}\n",
        f"kind: slurm\nvia: ssh {TOKEN}@host\n",
        "kind: kubernetes\npatches: [{merge: {spec: {env: [{name: DB_PASS, value: hunter2}]}}}]\n",
        f"kind: kubernetes\nmounts: [{{source: 'nfs:host:/{TOKEN}', target: /x}}]\n",
    ],
)
def test_a_secret_is_found_wherever_a_profile_holds_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(line)
    with pytest.raises(toolkit.ToolkitError, match=r"site\.yaml:2: .* holds what looks like "):
        toolkit.load_profile(str(path))


def test_the_names_of_secrets_are_none() -> None:
    pod = {
        "imagePullSecrets": [{"name": "registry-token"}],
        "volumes": [{"name": "x", "secret": {"secretName": "db-password"}}],
        "containers": [
            {
                "name": "node",
                "env": [
                    {
                        "name": "HF_TOKEN",
                        "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
                    }
                ],
            }
        ],
    }
    patch = {"merge": {"spec": {"template": {"spec": pod}}}}
    job = toolkit.JobSpec.model_validate(
        {"name": "a", "module": "m", "image": "a/b:1", "kubernetes": {"patches": [patch]}}
    )
    site = toolkit.KubernetesProfile(secret="wandb-secret", image_pull_secrets=("pull-token",))
    toolkit.plan(job.replace(secrets={"TOKEN": {"secret": "db-password", "key": "token"}}), site)


# ---- Shapes of secrets

SHAPES = {
    "npm": f"npm_{LETTERS}abcd",
    "npm, in its file": f"//registry.npmjs.org/:_authToken={LETTERS}",
    "PyPI": f"pypi-AgEIcHlwaS5vcmc{LETTERS}",
    "Docker": f"dckr_pat_{LETTERS[:27]}",
    "SendGrid": f"SG.{LETTERS[:22]}.{LETTERS}{LETTERS[:11]}",
    "Google": f"ya29.{LETTERS}",
    "bearer": f"Authorization: Bearer {LETTERS}",
    "Azure": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={LETTERS}==;Endpoint=x",
    "Azure, of a queue": f"Endpoint=sb://a/;SharedAccessKeyName=x;SharedAccessKey={LETTERS}=",
    "Stripe": f"sk_live_{LETTERS[:24]}",
    "Vault": f"hvs.{LETTERS}",
    "NVIDIA": f"nvapi-{LETTERS}",
    "Databricks": "dapi" + "0123456789abcdef" * 2,
    "Telegram": f"110201543:{LETTERS}abc",
    "an address within a text": "clone https://me:hunter2-hunter2@git.example.com/a.git",
    "Slack": f"https://hooks.slack.com/services/T00000000/B00000000/{LETTERS[:24]}",
}
NAMES = ["DB_PASS", "SMTP_PASS", "DB_PWD", "AZURE_STORAGE_KEY", "AWS_CREDS", "GIT_CRED"]
OTHERS = {
    "FORWARD_PASS": "fused",
    "TWO_PASS": "sampling",
    "BYPASS": "cache",
    "PWD": "work",
    "COMPASS": "north",
    "SORT_KEY": "length",
    "CREDIT": "high",
    "HEADER": "bearer of news and of others",
    "URL": "see https://wandb.example.com:8080/api, or ask me@example.com",
    "PROXY": "http://user:$PASSWORD@proxy:3128",
    "MODEL": "r8_models_of_old",
    "PACKAGE": "pypi-mirror-of-the-whole-company",
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_is_known_by_its_shape(name: str) -> None:
    assert secret_scan.kind_of(SHAPES[name]) is not None
    assert secret_scan.kind_of(f"x {SHAPES[name]} y") is not None
    shown = secret_scan.conceal(f"what is {SHAPES[name]} here?")
    assert LETTERS[:20] not in shown and "hunter2" not in shown
    assert shown.startswith("what is ") and shown.endswith(" here?")


DETECTORS = {
    "aws.AWSKeyDetector": 1,  # the second pattern goes by the name of a variable
    "azure_storage_key.AzureStorageKeyDetector": 1,
    "discord.DiscordBotTokenDetector": 1,
    "github_token.GitHubTokenDetector": 1,
    "gitlab_token.GitLabTokenDetector": 7,
    "mailchimp.MailchimpDetector": 1,
    "openai.OpenAIDetector": 1,
    "pypi_token.PypiTokenDetector": 2,
    "sendgrid.SendGridDetector": 1,
    "square_oauth.SquareOAuthDetector": 1,
    "stripe.StripeDetector": 1,
    "telegram_token.TelegramBotTokenDetector": 1,
    "twilio.TwilioKeyDetector": 2,
}
"""Those of a library that go by the shape alone, and how many of their patterns are tried. Left out
are names of products beside hexadecimal digits, JSON Web Tokens of two parts, and short words."""


@pytest.mark.parametrize("detector", DETECTORS)
def test_what_a_library_of_shapes_finds_is_found(detector: str) -> None:
    module, _, name = detector.partition(".")
    found = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)()
    printable = st.characters(min_codepoint=33, max_codepoint=126)
    for pattern in list(found.denylist)[: DETECTORS[detector]]:

        @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.from_regex(pattern, fullmatch=True, alphabet=printable))
        def is_found(value: str) -> None:
            assert secret_scan.kind_of(value) is not None

        is_found()


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_known_by_the_name_of_its_variable(name: str) -> None:
    assert secret_scan.kind_of("hunter2", name=name) == f"a value for {name}"


@pytest.mark.parametrize("name", OTHERS)
def test_names_and_values_that_look_a_little_like_it_pass(name: str) -> None:
    assert secret_scan.kind_of(OTHERS[name], name=name) is None


BEGINNINGS = [
    *("-eyJaaaaaaaa", "eyJaaaaaaaaa.", ".eyJaaaaaaaaa.eyJaaaaaaaaa", "SG.aaaaaaaaaaaaaaaaaaaa"),
    *("-----BEGIN A ", "Bearer ", "Bearer aaaaaaaa", "//a:_", " //a.b/", "a://", "hf_", "sk-ant-"),
    *("Maaaaaaaaaaaaaaaaaaaaaaaa.", " 12345678:", "0123456789abcdef", "AccountKey=", "pypi-Ag"),
]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_texts_that_begin_like_a_token_are_read_once(beginning: str) -> None:
    text = beginning * (1_000_000 // len(beginning))
    with guarded():
        secret_scan.conceal(text)
        secret_scan.kind_of(text, name="X")


def test_a_file_in_base64_is_no_token() -> None:
    token = "AP0" + "a1" * 40
    assert secret_scan.kind_of(f"key: {token}")
    assert secret_scan.kind_of(f"# supervisor.pyz: {'x' * 4000}/{token}+{'y' * 4000}") is None
