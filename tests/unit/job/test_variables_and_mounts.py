"""Variables, secrets and mounts of a job file: the names and the places that they may have."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.job_texts import of_job, read
from toolkit.job.spec import JobSpec
from toolkit.job.types import RESERVED_NAMES


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
        "job.yaml:1: 'A' is in both env and secrets: keep one",
        "job.yaml:1: 'B' is in both env and secrets: keep one",
    ]


def test_secrets_are_names_or_places() -> None:
    listed = read("name: a\nmodule: m\nsecrets: [A, B]\n")
    assert listed.secrets == {"A": None, "B": None}
    assert listed == read("name: a\nmodule: m\nsecrets: {A: , B: null}\n")
    assert of_job("secrets:\n- 1\n- no\n- A\n- A\n- [x]") == (
        "job.yaml:3: secrets: expected a name, not 1; expected a name, not ('x',); no is a "
        "boolean to YAML 1.1; write \"no\" if you mean the text; 'A' is listed twice"
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
