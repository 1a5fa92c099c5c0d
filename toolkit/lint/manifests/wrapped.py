"""Nested objects, such as a PyTorchJob that the operator of an AppWrapper creates."""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.text.manifests import Manifest, Stream, View


def unwrapped(stream: Stream) -> Stream:
    """Return a stream that also lists nested objects as separate objects."""
    manifests: list[Manifest] = []
    for manifest in stream.manifests:
        manifests += (manifest, *_inside(manifest))
    if len(manifests) == len(stream.manifests):
        return stream
    numbered = (replace(manifest, index=index) for index, manifest in enumerate(manifests))
    return Stream(manifests=tuple(numbered), pod_security=stream.pod_security)


def _inside(manifest: Manifest) -> Iterator[Manifest]:
    waiting: list[View] = [manifest.view.at("spec")]
    while waiting:
        view = waiting.pop()
        if view.text("kind") and view.text("apiVersion") and view.at("spec"):
            yield replace(manifest, data=view.value, path=(*manifest.path, *view.path), inside=True)
            continue
        waiting += reversed([*(entry for _, entry in view.entries()), *view.items()])
