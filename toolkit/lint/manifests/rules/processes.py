"""Rules about container processes: SIGTERM, exit codes, deadlines, variables, `$(NAME)`."""

import base64
import re
from collections.abc import Iterator

from toolkit.lint.manifests.pods import (
    SHUTDOWN_TIMEOUT_S,
    Container,
    containers_of,
    launches,
    pods_of,
    seconds,
    shell_of,
)
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text import secret_scan
from toolkit.text.manifests import Stream, View

_GRACE_S = 30  # the API's default


@MANIFESTS.rule(
    "sigterm-lost",
    finds="torchrun below a shell that does not pass SIGTERM on",
    reason="The shell is the container's first process: it gets SIGTERM, ignores it, and all are "
    "killed after the grace period without a checkpoint.",
    fix="write exec torchrun … as the last command; or start it with &, trap TERM, and wait",
)
def _lost(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        if launch.shell and not launch.passes:
            what = f"{launch.shell} is the first process, and torchrun never hears of SIGTERM"
            if launch.shell == "bash":
                what = f"{what}; bash gives its place to a last command without pipe or redirection"
            view = launch.container.view
            yield Violation(view.at("command" if view.at("command") else "args"), what)


@MANIFESTS.rule(
    "grace-too-short",
    finds="a terminationGracePeriodSeconds that is not longer than torchrun's shutdown timeout",
    reason="torchrun gives its workers that time for a checkpoint after SIGTERM. At the end of "
    "the grace period everything is killed, perhaps during the checkpoint (torch 2.13).",
    fix="raise terminationGracePeriodSeconds above --shutdown-timeout, by 15 s or more",
)
def _grace(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        if launch.pods.partly:
            continue
        grace = launch.pods.spec.at("terminationGracePeriodSeconds")
        limit = grace.whole() if grace else _GRACE_S
        option = launch.option("shutdown-timeout")
        timeout = SHUTDOWN_TIMEOUT_S if option is None else seconds(option)
        if limit is not None and timeout is not None and limit <= timeout:
            default = "" if grace else ", which is the default,"
            what = f"{limit} s of grace{default} and {timeout} s that torchrun gives its workers"
            yield Violation(grace, what)


@MANIFESTS.rule(
    "exit-status-unmapped",
    finds="`restartPolicy: ExitCode`, or a podFailurePolicy on exit statuses, with torchrun as "
    "the first process",
    reason="torchrun exits with status 1 for every failure of its workers (torch 2.13): ExitCode "
    "restarts, and rules for other statuses match, only if torchrun itself is killed (137).",
    fix="let a shell around it turn outcomes into statuses, or restart OnFailure",
)
def _unmapped(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        if launch.maps:
            continue
        policy = launch.pods.job.at("restartPolicy")
        if launch.pods.kind == "PyTorchJob" and policy.value == "ExitCode":
            yield Violation(policy, "ExitCode tries statuses from 128 on again, and 1 never")
        for entry in launch.pods.job.at("podFailurePolicy", "rules").items():
            codes = entry.at("onExitCodes")
            values = [item.whole() for item in codes.at("values").items()]
            container = codes.text("containerName")
            if container not in ("", launch.container.name) or codes.text("operator") != "In":
                continue
            if values and not {1, 137}.intersection(values):
                listed = ", ".join(map(str, values))
                yield Violation(codes, f"torchrun never exits with {listed}")


@MANIFESTS.rule(
    "deadline-below-grace",
    finds="an activeDeadlineSeconds no longer than the grace period",
    reason="The run would be stopped sooner than its stop may take.",
    fix="raise activeDeadlineSeconds",
)
def _deadlines(stream: Stream) -> Iterator[Violation[View]]:
    seen: set[tuple[int, tuple[str | int, ...]]] = set()
    for pods in pods_of(stream):
        grace = pods.spec.whole("terminationGracePeriodSeconds")
        if grace is None and not pods.partly:
            grace = _GRACE_S
        spec = pods.owner.view.at("spec")
        for view in (pods.job, pods.spec, spec, spec.at("runPolicy")):
            deadline = view.at("activeDeadlineSeconds")
            limit, key = deadline.whole(), (id(pods.owner), deadline.path)
            if limit is not None and grace is not None and limit <= grace and key not in seen:
                seen.add(key)
                yield Violation(deadline, f"{limit} s, and the grace period alone is {grace} s")


# ---- Variables and arguments

_REFERENCE = re.compile(r"\$\$|\$\(([^()\s$`'\"]+)\)")
_PLACEHOLDER = re.compile(r"\s*(<.*|\$.*|\{\{.*|)")
_SPECIAL = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|PYTHONUNBUFFERED|PET_\w+|JOB_COMPLETION_INDEX"
    r"|\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT(_\w+)?)"
)
"""Variables that operators and Services set."""


@MANIFESTS.rule(
    "secret-value",
    finds="a token, key or password in a manifest, even in a Secret",
    reason="Every reader of the file or the object sees the value, and the repository keeps "
    "it permanently; base64 hides nothing.",
    fix="write valueFrom: {secretKeyRef: …}, create the Secret with `kubectl create secret`, and "
    "replace the exposed secret",
)
def _secrets(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for name, entry in container.env.items():
            if kind := _kind(entry.text("value"), name):
                yield Violation(entry.at("value"), f"env contains what looks like {kind}")
        for key in ("command", "args"):
            words = container.view.at(key)
            texts = [item.text() for item in words.items()]
            for index, kind in secret_scan.kinds_of_words(texts):
                if secret_scan.is_placeholder(texts[index].partition("=")[2] or texts[index]):
                    continue
                yield Violation(words.at(index), f"{key} contains what looks like {kind}")
    for manifest in stream.of("ConfigMap"):
        for key, entry in manifest.view.at("data").entries():
            if kind := _kind(entry.text(), key):
                yield Violation(entry, f"a ConfigMap contains what looks like {kind}")
    for manifest in stream.of("Secret"):
        for where in ("data", "stringData"):
            for key, entry in manifest.view.at(where).entries():
                text = _decoded(entry.text()) if where == "data" else entry.text()
                if not (_PLACEHOLDER.fullmatch(text) or secret_scan.is_placeholder(text)):
                    yield Violation(entry, f"the Secret's file contains the value of {key!r}")
                    break


def _kind(value: str, name: str) -> str | None:
    return None if secret_scan.is_placeholder(value) else secret_scan.kind_of(value, name=name)


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError:
        return text


@MANIFESTS.rule(
    "reference-unknown",
    finds="`$(NAME)` where the container has no variable NAME",
    reason="Kubernetes leaves it unchanged: the program gets the characters $(NAME), and a shell "
    "runs NAME as a command (k8s.io/kubernetes, expansion).",
    fix='set the variable in env, above its use; in a shell write "$NAME"; as plain text write '
    "$$(NAME)",
)
def _references(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        if container.view.at("envFrom") or container.pods.partly:
            continue  # there may be other variables
        names: set[str] = set()
        for name, entry in container.env.items():
            for used in _unknown(entry.text("value"), names):
                later = used in container.env
                yield Violation(
                    entry.at("value"),
                    f"$({used}) in the value of {name}: the container has no such variable "
                    f"{'above it' if later else ''}".rstrip(),
                    fix="move its variable up" if later else None,
                )
            names.add(name)
        for word, script in _words(container):
            for used in _unknown(word.text(), names):
                if not script or used.isupper():
                    yield Violation(word, f"$({used}): the container has no variable of this name")


@MANIFESTS.rule(
    "dollars-halved",
    finds="`$$` in a script of `command` or `args`",
    reason="Kubernetes turns two $ into one before the shell sees them, so $$ does not give the "
    "process id.",
    fix="write $$$$",
)
def _dollars(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for word, script in _words(container):
            text = word.text()
            if script and "$$" in text and "$$(" not in text and "$$$" not in text:
                yield Violation(word, "$$ in this script becomes $")


def _unknown(text: str, defined: set[str]) -> list[str]:
    names = dict.fromkeys(match[1] for match in _REFERENCE.finditer(text) if match[1])
    return [name for name in names if name not in defined and not _SPECIAL.fullmatch(name)]


def _words(container: Container) -> Iterator[tuple[View, bool]]:
    """Yield each word of a container's command and arguments, and whether a shell reads it."""
    _, script, _ = shell_of(container.argv)
    for key in ("command", "args"):
        for item in container.view.at(key).items():
            yield item, bool(script) and item.value == script
