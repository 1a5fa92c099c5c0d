"""For any job, a server accepts the manifest, and hostile text arrives unchanged."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
from tests.fakes.kubernetes.containers import expand
from tests.support.rendered import KINDS, container_of, manifest, template_of, workload
from tests.support.strict_server import arrives, entry_of, faults

SHARP = [
    "$",
    "$(HOME)",
    "$(",
    "$$",
    "$$(A)",
    ")",
    "`",
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "$é",
    "\t",
    "é",
]
SHARP += ["{{", "}}", "{%", "#", " #", "%", "-", "--", ": ", "&", "*", "|", ">", "!", "@", ",", "]"]
SHARP += ["\x01", "\x1b", "\x7f", "\x85", "\x9f", "\xa0", "\u2028", "\u2029", "\ufeff", "\ufffe"]
SHARP += ["\U0001f600", "no", "null", "1e3", "0x1", " ", "\ud7ff", "\ue000", "\U0010ffff"]
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.lists(st.sampled_from(SHARP) | CHARACTERS, max_size=8).map("".join)
ARGS = st.lists(TEXTS, max_size=5).filter(lambda words: words[:1] != ["--"])  # torchrun's
IMAGES = st.sampled_from(["no", "null", "1e3", "012", "a/b:1", f"h:5000/a_b@sha256:{'0' * 64}"])
WORDS = TEXTS.filter(lambda text: re.fullmatch(r"\S+", text) is not None)
NAMES = st.sampled_from(["no", "y", "N", "null", "NULL", "true", "on", "_", "A", "e1", "inf"])
PATHS = TEXTS.map(lambda text: f"/m{text}").filter(lambda path: ":" not in path)
LABELS = st.sampled_from(["no", "y", "a.b-c_d", "1e3", "0x1", "A", "null", "12"])
SERVERS = st.sampled_from(["h", "no", "10.0.0.1", "[fd00::1]", "files.example.com"])
PROFILE_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "runs_claim": st.just("runs"),
        "runs_dir": st.sampled_from(["/runs", "/r u/n's", "/no", "/runs/"]),
        "network_interface": WORDS,
        "gpu_resource": st.just("amd.com/gpu"),
        "resources": st.just({"rdma/hca": 1}),
        "capabilities": st.just(["IPC_LOCK"]),
        "host_network": st.booleans(),
        "one_pod_per_node": st.booleans(),
        "network_policy": st.booleans(),
        "read_only_root": st.booleans(),
        "run_as_user": st.sampled_from([0, 1000, 2**31 - 1]),
        "gang_scheduler": st.sampled_from(["volcano", "scheduler-plugins"]),
        "queue": st.just("team"),
        "priority_class": st.just("no"),
        "service_account": st.just("null"),
        "image_pull_secrets": st.just(["on"]),
        "ttl": st.just("1h"),
        "topology": st.sampled_from([{"key": "zone"}, {"key": "a/zone", "required": True}]),
        "tolerations": st.sampled_from(
            [
                [{"operator": "Exists"}],
                [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}],
                [{"key": "x", "effect": "NoExecute", "tolerationSeconds": 60}],
            ]
        ),
        "mounts": st.sampled_from(
            [
                [{"source": f"{kind}:n", "target": "/v", "read_only": True}]
                for kind in ("claim", "configmap", "secret")
            ]
            + [[{"source": s, "target": "/v"}] for s in ("nfs:h:/p", "empty:", "empty:1GiB", "/p")]
        ),
    },
)


@pytest.mark.parametrize(
    ("text", "values", "arrives"),
    [
        ("$(A) $(B)", {"A": "1"}, b"1 $(B)"),
        ("$$(A) $$$(A) $$$$", {"A": "1"}, b"$(A) $1 $$"),
        ("$x $( $", {}, b"$x $( $"),
        ("$\xe9", {}, b"$\xc3\x83\xa9"),
    ],
)
def test_the_expansion_of_these_tests_is_that_of_kubernetes(
    text: str, values: dict[str, str], arrives: bytes
) -> None:
    assert expand(text, values) == arrives


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    args=ARGS,
    env=st.dictionaries(NAMES, TEXTS, max_size=4),
    site_env=st.dictionaries(NAMES, TEXTS, max_size=2),
    selector=st.dictionaries(LABELS, LABELS, max_size=2),
    image=IMAGES,
    paths=st.lists(PATHS, max_size=3, unique_by=lambda path: path.rstrip("/")),
    server=SERVERS,
)
def test_hostile_text_arrives_byte_for_byte(
    kind: str,
    args: list[str],
    env: dict[str, str],
    site_env: dict[str, str],
    selector: dict[str, str],
    image: str,
    paths: list[str],
    server: str,
) -> None:
    mounts = [{"source": path, "target": path} for path in paths]
    mounts.append({"source": f"nfs:{server}:/x", "target": "/from/nfs"})
    job = {"args": args, "env": env, "image": image, "mounts": mounts}
    profile = {"env": site_env, "node_selector": selector, "pod_security": "privileged"}
    text = manifest(job, profile, kind)
    assert faults(text) == []
    spec = template_of(workload(text))["spec"]
    (container,) = spec["containers"]
    environ, arguments = arrives(container)
    expected = site_env | env
    assert {name: environ[name] for name in expected} == {
        name: value.encode() for name, value in expected.items()
    }
    assert entry_of(arguments) == [word.encode() for word in ("-m", "train", *args)]
    assert container["image"] == image
    assert spec.get("nodeSelector", {}) == selector
    assert [m["mountPath"] for m in container["volumeMounts"][3:-1]] == paths
    assert [v["hostPath"]["path"] for v in spec["volumes"][3:-1]] == paths
    assert spec["volumes"][-1]["nfs"]["server"] == server


@settings(max_examples=50, deadline=None)
@given(args=ARGS.filter(bool), env=st.dictionaries(NAMES, TEXTS, min_size=1))
def test_every_text_is_one_line_and_json_where_it_is_no_plain_word(
    args: list[str], env: dict[str, str]
) -> None:
    """So that YAML 1.2 reads the same."""
    text = manifest({"args": args, "env": env}, {})
    container = container_of(workload(text))
    uncommented = re.sub(r"^( +- --[a-z=0-9-]+)  #.*$", r"\1", text, flags=re.MULTILINE)
    words = re.findall(r"^ {16}- (.*)$", uncommented.partition(" args:\n")[2], re.MULTILINE)
    found = words[: len(container["args"])]
    assert [unquoted(word) for word in found] == container["args"]
    pairs = re.findall(r"^ {16}- \{name: (\S+), value: (.*)\}$", text, re.MULTILINE)
    assert [(unquoted(name), unquoted(value)) for name, value in pairs] == [
        (variable["name"], variable["value"])
        for variable in container["env"]
        if "value" in variable
    ]


def unquoted(text: str) -> object:
    if text.startswith('"'):
        return json.loads(text)
    assert re.fullmatch(r"-{0,2}[A-Za-z/][-A-Za-z0-9_./=]*", text)
    assert text.lower() not in ["y", "n", "yes", "no", "on", "off", "true", "false", "null"]
    return text


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    nnodes=st.integers(1, 64),
    nproc=st.integers(1, 16),
    gpus=st.sampled_from([0, 16]),
    memory=st.integers(1, 2**50) | st.none(),
    limit=st.integers(100, 10**7) | st.none(),
    requeue=st.integers(0, 9),
    profile=PROFILE_KEYS,
)
def test_no_valid_job_makes_an_invalid_manifest(
    kind: str,
    nnodes: int,
    nproc: int,
    gpus: int,
    memory: int | None,
    limit: int | None,
    requeue: int,
    profile: dict[str, Any],
) -> None:
    resources = {
        "nnodes": nnodes,
        "nproc_per_node": nproc,
        "gpus_per_node": gpus,
        **({"memory": f"{memory}B"} if memory else {}),
    }
    job = {
        "resources": resources,
        "retries": {"requeue": requeue},
        **({"time_limit": f"{limit}s"} if limit else {}),
    }
    if "capabilities" in profile:
        profile["run_as_user"] = 0
    try:
        text = manifest(job, {"pod_security": "privileged", **profile}, kind)
    except toolkit.PlanError as error:
        assert kind == "TrainJob"
        assert {problem.rule for problem in error.problems} == {"trainjob-cannot-say"}
        return
    assert text == manifest(job, {"pod_security": "privileged", **profile}, kind)
    assert faults(text) == []
