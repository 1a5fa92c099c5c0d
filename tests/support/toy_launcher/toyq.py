"""A small batch system: a daemon with a queue, and a function that asks it.

A job is a script with arguments. Jobs start in the order of their submission, at most so many at a
time, each in a session of its own. A script that ends with 99 is queued again, as on Grid Engine.
The script of a job that is cancelled gets SIGTERM; when its grace is over, its session is killed.

    python toyq.py SPOOL SLOTS    serve on SPOOL/socket until SIGTERM
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGAIN = 99
"""The exit status with which a script asks to be queued again."""

_SOCKET = "socket"
_POLL_S = 0.05


@dataclass
class Job:
    """A job, and where it stands."""

    name: str
    argv: list[str]
    output: str
    """The file to which its output is appended."""

    grace_s: float
    environ: dict[str, str]
    state: str = "QUEUED"
    """`QUEUED`, `RUNNING`, `ENDED` or `CANCELLED`."""

    restarts: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    killed_at: float | None = None
    """When a job that was told to stop is killed."""


class Queue:
    """All jobs, by their numbers."""

    def __init__(self, slots: int) -> None:
        """Begin with none."""
        self.slots = slots
        self.jobs: dict[str, Job] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what a client asks for."""
        if request["do"] == "submit":
            number = str(len(self.jobs) + 1)
            keys = ("name", "argv", "output", "grace_s", "environ")
            self.jobs[number] = Job(**{key: request[key] for key in keys})
            return number
        if request["do"] == "cancel":
            return self._cancel(self.jobs[request["job"]])
        waiting = [number for number, job in self.jobs.items() if job.state == "QUEUED"]
        return {
            number: {
                "state": job.state,
                "restarts": job.restarts,
                "ahead": waiting.index(number) if number in waiting else 0,
            }
            for number, job in self.jobs.items()
        }

    def _cancel(self, job: Job) -> None:
        if job.state == "QUEUED":
            job.state = "CANCELLED"
        elif job.process is not None and job.killed_at is None:
            job.killed_at = time.monotonic() + job.grace_s
            job.process.terminate()

    def look(self) -> None:
        """Take notice of jobs that have ended, and start as many as there is room for."""
        running = [job for job in self.jobs.values() if job.process is not None]
        for job in running:
            assert job.process is not None
            if job.process.poll() is not None:
                self._end(job, job.process.returncode)
            elif job.killed_at is not None and time.monotonic() > job.killed_at:
                os.killpg(job.process.pid, signal.SIGKILL)
        free = self.slots - sum(job.process is not None for job in running)
        queued = [number for number, job in self.jobs.items() if job.state == "QUEUED"]
        for number in queued[:free]:
            self._start(number, self.jobs[number])

    def _start(self, number: str, job: Job) -> None:
        environ = {**job.environ, "TOYQ_JOB": number}
        with Path(job.output).open("ab") as output:
            job.process = subprocess.Popen(
                job.argv, env=environ, stdout=output, stderr=output, start_new_session=True
            )
        job.state = "RUNNING"

    def _end(self, job: Job, status: int) -> None:
        assert job.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)  # what the script has left
        stopped, job.process, job.killed_at = job.killed_at is not None, None, None
        again = status == AGAIN and not stopped
        job.restarts += again
        job.state = "QUEUED" if again else "ENDED"


def serve(spool: Path, slots: int) -> None:
    """Answer clients and run jobs until a signal ends this process, and its jobs with it."""
    queue = Queue(slots)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(spool / _SOCKET))
        server.listen()
        server.settimeout(_POLL_S)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    client, _ = server.accept()
                    with client, client.makefile("rw") as lines:
                        client.settimeout(None)
                        json.dump(queue.answer(json.loads(lines.readline())), lines)
                queue.look()
        finally:
            for job in queue.jobs.values():
                if job.process is not None:
                    os.killpg(job.process.pid, signal.SIGKILL)


def ask(spool: Path, **request: Any) -> Any:
    """Ask the daemon of a spool.

    Raises:
        OSError: there is none.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.relpath(spool / _SOCKET))
        with client.makefile("rw") as lines:
            lines.write(json.dumps(request) + "\n")
            lines.flush()
            return json.loads(lines.read())


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
