"""What the toolkit costs on Kubernetes.

Run as `make bench-kubernetes`. Two measurements:

1. `toolkit render --to k8s` beside `torchx run --dryrun -s kubernetes` for the same job, in turn:
   CPU time of whole processes.
2. `toolkit.wait` for 1,000 runs of one namespace, while a server in another process sends
   100,000 changes: the number of requests, and the growth of this process's memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import yaml

import toolkit
from benchmarks.render import HERE, PEER, in_turn, install_peer
from tests.support.run_records import remember

RUNS, EVENTS = 1_000, 100_000
GROWTH_MIB = 5.0
COMMANDS = {
    "toolkit render": [str(HERE / "toolkit"), "render", "jobs/digits.yaml", "--to", "k8s"],
    "torchx --dryrun": [
        str(PEER / "torchx"),
        # Without a workspace: it would want a docker daemon, to build an image.
        *("run", "--dryrun", "--workspace=", "-s", "kubernetes", "-cfg", "queue=default"),
        *("dist.ddp", "--image", "train:1", "-j", "2x1", "-m", "train"),
        *("--", "--task", "digits", "--epochs", "10"),
    ],
}


def rendering(rounds: int) -> float:
    """Measure both commands in turn; return the ratio of the medians."""
    install_peer("kubernetes")
    medians = in_turn(COMMANDS, rounds)
    return medians["toolkit render"] / medians["torchx --dryrun"]


# ---- A server with many runs


def run_object(number: int, version: int, condition: str) -> dict[str, object]:
    """Return a JobSet as a server shows it."""
    name = f"bench-{number:04}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": name,
            "resourceVersion": str(version),
            "labels": {"torch-deploy-toolkit/run": name},
            "managedFields": [{"manager": "other", "fieldsV1": {"f:spec": {"x" * 500: {}}}}],
        },
        "spec": {"replicatedJobs": []},
        "status": {
            "restarts": version % 7,
            "conditions": [{"type": condition, "status": "True"}] if condition else [],
        },
    }


class RunServer(BaseHTTPRequestHandler):
    """Answers lists; sends each watch all changes, the last of which completes every run."""

    protocol_version = "HTTP/1.1"
    counts: ClassVar = {"list": 0, "watch": 0}

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer a list or a watch."""
        query = parse_qs(urlsplit(self.path).query)
        if "watch" in query:
            self.counts["watch"] += 1
            self._watch()
            return
        self.counts["list"] += 1
        items = [run_object(number, number + 1, "") for number in range(RUNS)]
        body = {"kind": "List", "metadata": {"resourceVersion": str(RUNS)}, "items": items}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _watch(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(EVENTS + RUNS):
            ended = "Completed" if number >= EVENTS else ""
            found = run_object(number % RUNS, RUNS + number, ended)
            line = json.dumps({"type": "MODIFIED", "object": found}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        threading.Event().wait()


def serve() -> None:
    """Serve until stdin closes, then print the number of requests of each kind."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), RunServer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    print(json.dumps(RunServer.counts), flush=True)


# ---- The client that waits for them


def resident_mib() -> float:
    """Return the memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def waiting(folder: Path) -> float:
    """Wait for all runs; return by how much this process has grown over the events, in MiB."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kubernetes", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": {"server": url}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    os.environ |= {"KUBECONFIG": str(folder / "config"), "XDG_STATE_HOME": str(folder)}
    profile = toolkit.KubernetesProfile(name="bench", context="bench", workload="JobSet")
    for number in range(RUNS):
        name = f"bench-{number:04}"
        remember(f"k8s://default/{name}", name=name, job="bench", profile=profile)
    sizes: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            sizes.append(resident_mib())

    looking = threading.Thread(target=look)
    looking.start()
    began_s = time.monotonic()
    try:
        found = toolkit.wait(toolkit.list_runs())
    finally:
        over.set()
        looking.join()
    took_s = time.monotonic() - began_s
    counts, _ = server.communicate("")
    assert len(found) == RUNS
    assert {status.state for status in found} == {toolkit.RunState.SUCCEEDED}
    # The first quarter has the list of all runs in it, which needs most at once.
    quarter = len(sizes) // 4
    first = max(sizes[:quarter])
    grown = max(0.0, max(sizes[quarter:]) - first)
    print(
        f"{RUNS} runs, {EVENTS} events in {took_s:.1f} s; requests: {counts.strip()}; memory "
        f"{first:.1f} MiB in the first quarter of the time, {grown:.1f} MiB more at most afterwards"
    )
    return grown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="counted rounds (default 11)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as folder:
        grown = waiting(Path(folder))
    print(f"growth {grown:.1f} MiB, aim {GROWTH_MIB:.0f} MiB")
    print(f"toolkit render / torchx --dryrun: {rendering(arguments.rounds):.2f} (aim 1)")


if __name__ == "__main__":
    main()
