"""Serve a cluster until interrupted: `python -m tests.fakes.kubernetes --kubeconfig FILE`."""

import argparse
import signal
import threading
from pathlib import Path

from tests.fakes.kubernetes import FakeKubernetes

RUNTIME = Path(__file__).parents[3] / "k8s" / "base" / "trainer" / "runtime.yaml"


def main() -> None:
    """Serve, and write a kubeconfig once there is something to reach."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.kubernetes", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="the file to write")
    parser.add_argument("--port", type=int, default=0, help="where to listen (default: any)")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--privileged", action="store_true", help="no Pod Security")
    parser.add_argument("--idle", action="store_true", help="start no pod's processes")
    given = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with FakeKubernetes(
        namespaces=(given.namespace,),
        auto_run=not given.idle,
        restricted=not given.privileged,
        kueue=True,
        port=given.port,
    ) as server:
        server.apply(RUNTIME.read_text().replace("namespace: team-a", ""))
        server.kubeconfig(given.kubeconfig, contexts={"fake": given.namespace})
        print(f"serving {server.url}, volumes in {server.root}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
