"""A Kubernetes cluster for tests: API server, controllers and kubelet, on the standard library.

It behaves as real clusters were observed to behave, refusals and silences included. Usage:

    with FakeKubernetes() as server:                    # nothing happens by itself, only by calls
        api = server.api_client()                       # an official client for it
        server.kubeconfig(tmp_path / "config")          # or a kubeconfig (contexts=… for more)
        server.apply(manifest_text)                     # as `kubectl apply --server-side`
        server.run(name); server.log(pod, "line"); server.restart(pod); server.finish(name)

    with FakeKubernetes(auto_run=True) as server: ...   # pods run as processes of this machine

Constructor: `namespaces=("default",)`, `operator=True` (False takes all operators away: their
groups answer `404 page not found`), `without=("kueue.x-k8s.io",)` takes single API groups away,
`auto_run=False`, `secrets={NAME: {KEY: VALUE}}`, `restricted=False` (Pod Security), `kueue=False`
(True: an object with a queue label waits until `admit(NAME)`), `back_off_s` and `clean_after_s`
(how long a failed container, and the pods of a job that has ended, wait).

What every workload (PyTorchJob, TrainJob, JobSet, Job) has, found by its name; where names may be
the same in two kinds, say `kind=`:

| call | does |
|---|---|
| `job(NAME, kind=)`, `jobs(kind=)`, `pods(NAME)`, `object(KIND, NAME)` | copies |
| `create(BODY)`, `apply(TEXT)`, `patch(KIND, NAME, {...})`, `delete(NAME)` | as another client |
| `run(NAME)` | its pods run, the workload's condition follows |
| `finish(NAME, succeeded=, message=, reason=, exit_code=, last_words=)` | containers end, and it |
| `restart(POD, reason=, exit_code=)` | a container starts again in place |
| `recreate(NAME)` | a gang restart: all pods deleted and made anew, restart-attempt + 1 |
| `condition(NAME, TYPE, reason=, message=)` | makes a condition true |
| `pod_status(POD, waiting=, **status)`, `warn(NAME, REASON, WORDS)` | set a status, add an event |
| `evict(POD)`, `kill(POD)`, `oom(POD)` | with auto_run: disruption, SIGKILL, out of memory |
| `cut_power(POD)` | with auto_run: its node is lost; the pod is deleted and stays |
| `admit(NAME)`, `queue_says(NAME, REASON, MESSAGE)`, `preempt(NAME)` | Kueue's Workload |

Faults on demand:

- `faults = [Fault(method="POST", path=REGEX, status=429, retry_after="7", times=2)]`; without a
  status the connection is dropped; `arrives=True` does the request first; `latency_s`, `reason`.
- `expire()` (watches and continued lists get 410), `hang_up()` (all connections drop), `away()`
  (a context: connections are refused), `cut_logs = [3]`, `hold_deletes = True` + `stopped(NAME)`.
- `refuse_pods = WORDS` (no pod can be made: only events say so), `deny[KIND] = WORDS` (a webhook
  refuses), `forbid(RESOURCE, *VERBS)` (RBAC), `tokens = {"t"}` (others get 401).
- `requests` lists every request: method, path, query. `watches` counts those that are open.

With auto_run, pods that request more CPUs than any node has are not scheduled, and images of hosts
called `….invalid` cannot be pulled.

`cluster_under_test()` (tests/fakes/kubernetes/real.py) is this or, with KUBECONFIG set and
TOOLKIT_TEST_CLUSTER=1, a real one: `make test-cluster`, CONTRIBUTING.md.
`python -m tests.fakes.kubernetes --kubeconfig FILE` serves one.

Modules: `resources` (the table of kinds), `store` (objects, versions, journal), `wire` (HTTP),
`reading` (lists, watches), `api` (verbs), `selecting`, `patching`, `applying` (server-side apply),
`checking` (schemas), `admission` (webhooks, Pod Security, immutable fields), `kubelet`,
`containers` and `execs` (processes, `pods/exec`), `nodes` (what fits), `indexed`, `jobsets`,
`trainjobs`, `pytorchjobs`, `kueue` (controllers), `hands` (what a test does), `fake`
(FakeKubernetes).
"""

from tests.fakes.kubernetes.fake import FakeKubernetes
from tests.fakes.kubernetes.real import cluster_under_test
from tests.fakes.kubernetes.wire import Fault

__all__ = ["FakeKubernetes", "Fault", "cluster_under_test"]
