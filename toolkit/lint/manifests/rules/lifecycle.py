"""Rules about ends: SIGTERM, the grace period, exit statuses, deadlines."""

from collections.abc import Iterator

from toolkit.lint.manifests.command import SHUTDOWN_TIMEOUT_S, Launch, launches, seconds
from toolkit.lint.manifests.pods import pods_of
from toolkit.lint.manifests.registry import Fault, rule
from toolkit.text.manifests import Stream, View

__all__: list[str] = []

_GRACE_S = 30  # the API's default


def _command(launch: Launch) -> View:
    view = launch.container.view
    return view.at("command") if view.at("command") else view.at("args")


@rule(
    "sigterm-lost",
    finds="torchrun below a shell that does not pass SIGTERM on",
    reason="The shell is the container's first process: it gets SIGTERM, ignores it, and all are "
    "killed after the grace period without a checkpoint.",
    fix="write exec torchrun … as the last command; or start it with &, trap TERM, and wait",
)
def _lost(stream: Stream) -> Iterator[Fault]:
    for launch in launches(stream):
        if launch.shell and not launch.passes:
            what = f"{launch.shell} is the first process, and torchrun never hears of SIGTERM"
            yield Fault(at=_command(launch), what=what)


@rule(
    "grace-too-short",
    finds="a terminationGracePeriodSeconds that is not longer than torchrun's shutdown timeout",
    reason="torchrun gives its workers that time for a checkpoint after SIGTERM; at the end of the "
    "grace period all are killed, at it or in the midst of it (torch 2.13).",
    fix="raise terminationGracePeriodSeconds above --shutdown-timeout, by 15 s or more",
)
def _grace(stream: Stream) -> Iterator[Fault]:
    for launch in launches(stream):
        if launch.pods.partly:
            continue
        grace = launch.pods.spec.at("terminationGracePeriodSeconds")
        limit = grace.whole() if grace else _GRACE_S
        given = launch.option("shutdown-timeout")
        timeout = SHUTDOWN_TIMEOUT_S if given is None else seconds(given)
        if limit is not None and timeout is not None and limit <= timeout:
            default = "" if grace else ", which is the default,"
            yield Fault(
                at=grace,
                what=f"{limit} s of grace{default} and {timeout} s that torchrun gives its workers",
            )


@rule(
    "exit-status-unmapped",
    finds="`restartPolicy: ExitCode`, or a podFailurePolicy on exit statuses, with a torchrun that "
    "is the first process",
    reason="torchrun exits 1 whatever has happened to its workers: ExitCode never starts anything "
    "again, and rules on other statuses never match (torch 2.13).",
    fix="let a shell around it turn outcomes into statuses, or restart OnFailure",
)
def _unmapped(stream: Stream) -> Iterator[Fault]:
    for launch in launches(stream):
        if launch.maps:
            continue
        policy = launch.pods.job.at("restartPolicy")
        if launch.pods.kind == "PyTorchJob" and policy.value == "ExitCode":
            yield Fault(at=policy, what="ExitCode tries statuses from 128 on again, and 1 never")
        for entry in launch.pods.job.at("podFailurePolicy", "rules").items():
            codes = entry.at("onExitCodes")
            values = [item.whole() for item in codes.at("values").items()]
            container = codes.text("containerName")
            if container not in ("", launch.container.name) or codes.text("operator") != "In":
                continue
            if values and 1 not in values:
                listed = ", ".join(map(str, values))
                yield Fault(at=codes, what=f"torchrun never exits with {listed}")


@rule(
    "deadline-below-grace",
    finds="an activeDeadlineSeconds that is not longer than the grace period",
    reason="The run would be told to stop before it has begun.",
    fix="raise activeDeadlineSeconds",
)
def _deadlines(stream: Stream) -> Iterator[Fault]:
    seen: set[tuple[int, tuple[str | int, ...]]] = set()
    for pods in pods_of(stream):
        grace = pods.spec.whole("terminationGracePeriodSeconds")
        spec = pods.owner.view.at("spec")
        places = [pods.job.at("activeDeadlineSeconds"), pods.spec.at("activeDeadlineSeconds")]
        places += [spec.at("activeDeadlineSeconds")]
        places += [spec.at("runPolicy", "activeDeadlineSeconds")]
        for deadline in places:
            key = (id(pods.owner), deadline.path)
            limit = deadline.whole()
            given = _GRACE_S if grace is None and not pods.partly else grace
            if limit is None or given is None or limit > given or key in seen:
                continue
            seen.add(key)
            yield Fault(at=deadline, what=f"{limit} s, of which {given} s are the grace period")
