"""Objects inside of others: a PyTorchJob in an AppWrapper, which the wrapper's operator makes."""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.text.manifests import Manifest, Stream, View


def unwrapped(stream: Stream) -> Stream:
    """Return a stream with the objects that stand inside its objects as objects of their own."""
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
