"""Rules about variables and arguments: secrets in them, and what Kubernetes makes of `$(NAME)`."""

import re
from collections.abc import Iterator

from toolkit.lint.manifests.command import shell_of
from toolkit.lint.manifests.pods import Container, containers_of
from toolkit.lint.manifests.registry import Fault, rule
from toolkit.text import secret_scan
from toolkit.text.manifests import Stream, View

__all__: list[str] = []

_REFERENCE = re.compile(r"\$\$|\$\(([^()\s$`'\"]+)\)")
_PLACEHOLDER = re.compile(r"\s*(<.*|\$.*|\{\{.*|)")
_SPECIAL = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|PYTHONUNBUFFERED|PET_\w+|JOB_COMPLETION_INDEX"
    r"|\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT(_\w+)?)"
)
"""Variables that operators and Services bring."""


@rule(
    "secret-value",
    finds="a token, key or password in a manifest, be it that of a Secret",
    reason="Whoever may read the file or the object has it, and the repository remembers it for "
    "ever; base64 hides nothing.",
    fix="write valueFrom: {secretKeyRef: …}, make the Secret with `kubectl create secret`, and "
    "change what has been written down",
)
def _secrets(stream: Stream) -> Iterator[Fault]:
    for container in containers_of(stream):
        for name, entry in container.env.items():
            if kind := secret_scan.kind_of(entry.text("value"), name=name):
                yield Fault(at=entry.at("value"), what=f"what looks like {kind} stands in env")
        for key in ("command", "args"):
            words = container.view.at(key)
            texts = [item.text() for item in words.items()]
            for index, kind in secret_scan.kinds_of_words(texts):
                yield Fault(at=words.at(index), what=f"what looks like {kind} stands in {key}")
    for manifest in stream.of("ConfigMap"):
        for key, entry in manifest.view.at("data").entries():
            if kind := secret_scan.kind_of(entry.text(), name=key):
                yield Fault(at=entry, what=f"what looks like {kind} stands in a ConfigMap")
    for manifest in stream.of("Secret"):
        for where in ("data", "stringData"):
            for key, entry in manifest.view.at(where).entries():
                if not _PLACEHOLDER.fullmatch(entry.text()):
                    yield Fault(at=entry, what=f"the value of {key!r} stands in a Secret's file")
                    break


@rule(
    "reference-unknown",
    finds="`$(NAME)` with the name of no variable of the container",
    reason="Kubernetes leaves it as it stands: the program gets the characters $(NAME), and a "
    "shell takes NAME for a command (k8s.io/kubernetes, expansion).",
    fix='set the variable in env, above its use; in a shell write "$NAME"; as plain text write '
    "$$(NAME)",
)
def _references(stream: Stream) -> Iterator[Fault]:
    for container in containers_of(stream):
        if container.view.at("envFrom") or container.pods.partly:
            continue  # there may be others
        names: set[str] = set()
        for name, entry in container.env.items():
            for used in _unknown(entry.text("value"), names):
                later = used in container.env
                yield Fault(
                    at=entry.at("value"),
                    what=f"$({used}) in the value of {name}: the container has no such variable "
                    f"{'above it' if later else ''}".rstrip(),
                    fix="move its variable up" if later else None,
                )
            names.add(name)
        for word, script in _words(container):
            for used in _unknown(word.text(), names):
                if not script or used.isupper():
                    what = f"$({used}): the container has no variable of this name"
                    yield Fault(at=word, what=what)


@rule(
    "dollars-halved",
    finds="`$$` in a script of `command` or `args`",
    reason="Kubernetes makes one $ of two before the shell sees them: $$ is no process id.",
    fix="write $$$$",
)
def _dollars(stream: Stream) -> Iterator[Fault]:
    for container in containers_of(stream):
        for word, script in _words(container):
            text = word.text()
            if script and "$$" in text and "$$(" not in text and "$$$" not in text:
                yield Fault(at=word, what="$$ in this script becomes $")


def _unknown(text: str, defined: set[str]) -> list[str]:
    names = dict.fromkeys(match[1] for match in _REFERENCE.finditer(text) if match[1])
    return [name for name in names if name not in defined and not _SPECIAL.fullmatch(name)]


def _words(container: Container) -> Iterator[tuple[View, bool]]:
    """Yield what a container starts, and whether a shell reads the word."""
    _, script, _ = shell_of(container.words)
    for key in ("command", "args"):
        for item in container.view.at(key).items():
            yield item, bool(script) and item.value == script
