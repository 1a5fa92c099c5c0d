"""Patches of a profile and a job change the manifest as Kubernetes would change it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
from tests.support.rendered import KINDS, container_of, manifest, read, template_of, workload
from toolkit.errors import RenderError
from toolkit.job.kubernetes_options import Patch
from toolkit.rendering import patches as applied


def patched(*patches: dict[str, Any], kind: str = "Job", **job: Any) -> str:
    return manifest(job, {"patches": patches, "runs_claim": "runs"}, kind)


def template_patch(kind: str, template: dict[str, Any]) -> dict[str, Any]:
    """Return the strategic merge patch that changes the template of the pods of a kind."""
    match kind:
        case "PyTorchJob":
            return {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": template}}}}
        case "Job":
            return {"spec": {"template": template}}
    jobs = [{"name": "node", "template": {"spec": {"template": template}}}]
    if kind == "JobSet":
        return {"spec": {"replicatedJobs": jobs}}
    runtime = {"template": {"spec": {"replicatedJobs": jobs}}}
    patch = {"manager": "torch-deploy-toolkit/job", "trainingRuntimeSpec": runtime}
    return {"spec": {"runtimePatches": [patch]}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_reaches_the_pods_of_each_kind(kind: str) -> None:
    plain = workload(manifest({}, {"runs_claim": "runs"}, kind))
    container = next(iter(template_of(copy.deepcopy(plain))["spec"]["containers"]))["name"]
    template: dict[str, Any] = {
        "metadata": {"annotations": {"a/b": "it's $(x) 'é'\n\u2028#"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {"name": container, "volumeMounts": [{"name": "more", "mountPath": "/more"}]}
            ],
            "volumes": [{"name": "more", "emptyDir": {}}],
        },
    }
    found = workload(patched({"merge": template_patch(kind, template)}, kind=kind))
    expected = template_of(copy.deepcopy(plain))
    expected["metadata"]["annotations"] = template["metadata"]["annotations"]
    expected["spec"]["tolerations"] = [{"operator": "Exists"}]
    expected["spec"]["volumes"] += [{"name": "more", "emptyDir": {}}]
    (one,) = expected["spec"]["containers"]
    one["volumeMounts"] += [{"name": "more", "mountPath": "/more"}]
    assert template_of(found) == expected


def test_lists_merge_by_their_keys_and_others_are_replaced() -> None:
    spec = {
        "containers": [
            {
                "name": "node",
                "image": "other",
                "args": ["sleep", "$(HOME)"],
                "env": [
                    {"name": "HOME", "value": "/h"},
                    {"name": "PYTHONUNBUFFERED", "$patch": "delete"},
                ],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            },
            {"name": "side", "image": "s"},
        ],
        "volumes": [
            {"name": "runs", "$retainKeys": ["name", "emptyDir"], "emptyDir": {}},
            {"name": "shm", "$patch": "delete"},
        ],
        "terminationGracePeriodSeconds": None,
        "securityContext": {"$patch": "replace", "runAsUser": 7},
    }  # fmt: skip
    found = template_of(workload(patched({"merge": template_patch("Job", {"spec": spec})})))["spec"]
    node, side = found["containers"]
    assert (node["image"], node["args"], side) == (
        "other",
        ["sleep", "$(HOME)"],
        {"name": "side", "image": "s"},
    )
    env = {entry["name"]: entry.get("value") for entry in node["env"]}
    assert env["HOME"] == "/h" and "PYTHONUNBUFFERED" not in env and "TRAIN_RUN_DIR" in env
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert found["volumes"] == [{"name": "tmp", "emptyDir": {}}, {"name": "runs", "emptyDir": {}}]
    assert found["securityContext"] == {"runAsUser": 7}
    assert "terminationGracePeriodSeconds" not in found


def test_operations_of_a_json_patch_come_one_after_the_other() -> None:
    operations = [
        {"op": "test", "path": "/spec/publishNotReadyAddresses", "value": True},
        {"op": "add", "path": "/spec/ports", "value": []},
        {"op": "add", "path": "/spec/ports/-", "value": {"name": "x", "port": 29500}},
        {"op": "add", "path": "/metadata/annotations", "value": {"a/b": "no"}},
    ]
    _, service, _ = read(patched({"kind": "Service", "json": operations}))
    assert service["spec"]["ports"] == [{"name": "x", "port": 29500}]
    assert service["metadata"]["annotations"] == {"a/b": "no"}


def test_the_jobs_patches_come_after_those_of_the_profile() -> None:
    def label(value: str) -> dict[str, Any]:
        return {"merge": {"metadata": {"labels": {"who": value}}}}

    text = patched(label("site"), kubernetes={"patches": [label("job")]})
    assert workload(text)["metadata"]["labels"]["who"] == "job"


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_patch_changes_stays_as_it_is_but_for_comments(kind: str) -> None:
    job = {"args": ["no", "1e3", "$(A)", "a\nb", " x", "\u2028", "y: z"], "env": {"no": "null"}}
    profile = {"runs_claim": "runs", "supervisor": "carried"}
    plain = manifest(job, profile, kind)
    kind_of_all = {"kind": "NetworkPolicy", "merge": {"metadata": {"labels": {"a": "b"}}}}
    text = manifest(job, {**profile, "patches": [kind_of_all]}, kind)
    supervisor, policy, *rest = read(plain)
    policy["metadata"]["labels"]["a"] = "b"
    assert read(text) == [supervisor, policy, *rest]
    assert text.splitlines()[:2] == plain.splitlines()[:2]
    # The command can still be read.
    assert container_of(workload(text))["command"][2].splitlines()[1].strip() in text


def test_a_patch_changes_every_point_of_a_sweep() -> None:
    text = patched(
        {"merge": {"metadata": {"labels": {"a": "b"}}}}, sweep={"grid": {"env.S": [1, 2]}}
    )
    jobs = [document for document in read(text) if document["kind"] == "Job"]
    assert [job["metadata"]["labels"].get("a") for job in jobs] == ["b", "b"]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            {"kind": "Deployment", "merge": {"spec": {}}},
            "no Deployment is rendered; there are NetworkPolicy, Service, Job",
        ),
        (
            {"merge": {"spec": {"template": {"spec": {"containers": [{"image": "i"}]}}}}},
            'merge: spec.template.spec.containers: an entry needs its name: {"image": "i"}',
        ),
        (
            {"merge": {"spec": {"parallelism": {"a": 1}}}},
            'merge: spec.parallelism is 1, which {"a": 1} cannot join',
        ),
        (
            {"merge": {"spec": {"template": "x"}}},
            'merge: spec.template is a mapping, which "x" cannot replace',
        ),
        ({"merge": {"spec": ["x"]}}, 'merge: spec is a mapping, which ["x"] cannot join'),
        (
            {
                "merge": template_patch(
                    "Job", {"spec": {"volumes": [{"name": "x", "$patch": "delete"}]}}
                )
            },
            "merge: spec.template.spec.volumes[x] is not there to be deleted; there are tmp, shm, "
            "runs",
        ),
        (
            {"merge": {"spec": {"$patch": "remove"}}},
            'merge: spec: $patch is "remove"; write replace or delete',
        ),
        (
            {"merge": {"spec": {"$setElementOrder/x": []}}},
            "merge: spec.$setElementOrder/x: the toolkit knows $patch and $retainKeys",
        ),
        (
            {"json": [{"op": "add", "path": "/a", "value": 1}, {"op": "remove", "path": "/b"}]},
            'json[1] {"op": "remove", "path": "/b"} does not apply: ',
        ),
        (
            {"json": [{"op": "test", "path": "/kind", "value": "X"}]},
            'json[0] {"op": "test", "path": "/kind", "value": "X"} does not apply: ',
        ),
        ({"json": [{"op": "jump", "path": "/a"}]}, 'json[0] {"op": "jump", "path": "/a"} does not'),
        ({"json": [{"path": "a"}]}, 'json[0] {"path": "a"} does not apply: '),
        (
            {"merge": {"metadata": {"name": "x"}}},
            "apiVersion, kind, name and namespace are how the run is found again",
        ),
    ],
)  # fmt: skip
def test_a_patch_that_does_not_apply_is_refused_by_its_place(
    patch: dict[str, Any], message: str
) -> None:
    good = {"merge": {"metadata": {"labels": {"a": "b"}}}}
    with pytest.raises(RenderError) as error:
        patched(good, patch)
    assert str(error.value).startswith(f"profile 'k8s'.patches[1]: {message}")
    assert len(str(error.value)) < 250, "not the whole object"
    with pytest.raises(RenderError) as error:
        patched(good, kubernetes={"patches": [patch]})
    assert str(error.value).startswith(f"job 't': kubernetes.patches[0]: {message}")


def test_without_the_library_of_json_patches_the_way_out_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jsonpatch", None)
    with pytest.raises(RenderError, match="pip install jsonpatch"):
        patched({"json": [{"op": "remove", "path": "/metadata/labels"}]})


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=VALUES.filter(lambda value: "$" not in str(value)), key=TEXTS)
def test_hostile_text_survives_a_patch(value: Any, key: str) -> None:
    if key.startswith("$"):
        return
    operation = {"op": "add", "path": "/spec/x", "value": {key: value}}
    for patch in ({"merge": {"spec": {"x": {key: value}}}}, {"json": [operation]}):
        assert workload(patched(patch))["spec"]["x"] == {key: value}


def test_the_words_of_a_patch_have_one_meaning(tmp_path: Any) -> None:
    """`no` in a profile is refused as anywhere else, since YAML 1.1 and 1.2 disagree on it."""
    path = tmp_path / "site.yaml"
    path.write_text("kind: kubernetes\npatches: [{merge: {metadata: {labels: {a: no}}}}]\n")
    with pytest.raises(toolkit.ProfileError, match='write "no" if you mean the text'):
        toolkit.load_profile(str(path))


def test_a_date_is_a_text_as_kubernetes_reads_it() -> None:
    text = "apiVersion: v1\nkind: Service\nmetadata: {name: a, annotations: {review: 2026-01-01}}\n"
    made = applied.patched(text, [("p", "Service", Patch(merge={"spec": {"x": 1}}))])
    assert read(made)[0]["metadata"]["annotations"] == {"review": "2026-01-01"}


def test_a_patch_that_leaves_no_metadata_is_refused() -> None:
    change = [{"op": "replace", "path": "/metadata", "value": "s"}]
    with pytest.raises(RenderError, match="are how the run is found again"):
        patched({"kind": "Service", "json": change})
