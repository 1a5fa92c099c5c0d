"""Reports the progress of a TrainJob to Kubeflow Trainer, for `status.trainerStatus`.

Trainer 2.2 or later with the feature gate TrainJobStatus sets three variables in the pods: an
address, and the paths of a certificate and of a token that is valid for this TrainJob only (KEP
2779). Without them nothing is sent. A server that does not answer does no harm.
"""

from __future__ import annotations

import json
import math
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVERY_S = 10.0
TIMEOUT_S = 5.0
LAST_BYTES = 1 << 16
"""How many bytes of the metrics to read: about 250 steps."""

LENGTH = 64
"""The longest name or value of a metric, in characters."""

MOST_METRICS = 32
PLACE = {"version", "time", "attempt", "restart", "step", "steps", "count", "epoch", "samples_seen"}
"""Fields of a record that are not metrics."""


def objects_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in lines; the first and the last line may be incomplete."""
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def status_of(rows: list[dict[str, Any]], outcome: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the trainerStatus of a run from its newest records; None without records.

    Args:
        rows: The records of `metrics.jsonl`.
        outcome: The record `outcome.json`, which has the number of steps.
    """
    rows = [row for row in rows if is_number(row.get("step")) and is_number(row.get("time"))]
    if not rows:
        return None
    last = rows[-1]
    step, when = last["step"], time.gmtime(last["time"])
    figures = {"step": step}
    for row in rows:
        if row["step"] == step:  # training and evaluation have separate records
            figures.update({name: value for name, value in row.items() if name not in PLACE})
    status: dict[str, Any] = {
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", when),
        "metrics": [
            {"name": name[:LENGTH], "value": f"{value:.6g}"[:LENGTH]}
            for name, value in figures.items()
            if name and is_number(value)
        ][:MOST_METRICS],
    }
    total = next(filter(is_number, (outcome.get("steps"), last.get("steps"))), 0)
    if not 0 < step <= total:
        return status
    status["progressPercentage"] = int(100 * step / total)
    start = [row for row in rows if start_of(row) == start_of(last)]
    steps, seconds = step - start[0]["step"], last["time"] - start[0]["time"]
    if steps > 0 and seconds >= 0:
        left_s = seconds / steps * (total - step)
        status["estimatedRemainingSeconds"] = min(round(left_s), (1 << 31) - 1)
    return status


def start_of(row: Mapping[str, Any]) -> tuple[object, object]:
    """Return the start of the ranks that wrote a record."""
    return row.get("attempt"), row.get("restart")


class TrainerStatus:
    """Sends the status of a run every ten seconds, if it has changed."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self.url = environ.get("KUBEFLOW_TRAINER_SERVER_URL", "")
        self.certificate = environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT") or None
        self.token = environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN", "")
        self.sent, self.size, self.complaint = -math.inf, 0, ""
        self.thread = threading.Thread()  # not started

    def look(self, now: float) -> None:
        """Send the status if it is due; a thread waits for the answer."""
        if self.url and now - self.sent >= EVERY_S and not self.thread.is_alive():
            self.sent = now
            self.thread = threading.Thread(target=self.send, daemon=True)
            self.thread.start()

    def finish(self) -> None:
        """Send the last status."""
        if self.url:
            if self.thread.is_alive():
                self.thread.join(TIMEOUT_S)
            self.send()

    def send(self) -> None:
        """Send the status; print each new error once."""
        try:
            if status := self.changed_status():
                self.post({"trainerStatus": status})
                self.complaint = ""
        except Exception as error:  # a server may answer anything
            if str(error) != self.complaint:
                self.complaint = str(error)
                print(f"watchdog: no status to the trainer: {error}", file=sys.stderr, flush=True)

    def changed_status(self) -> dict[str, Any] | None:
        """Return the status; None without a new record."""
        metrics = self.run_dir / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == self.size:
            return None
        with metrics.open("rb") as file:
            file.seek(max(size - LAST_BYTES, 0))
            rows = objects_in(file.read(LAST_BYTES).decode("utf-8", "replace"))
        self.size = size
        outcome = self.run_dir / "outcome.json"
        text = outcome.read_text(encoding="utf-8", errors="replace") if outcome.exists() else ""
        return status_of(rows, next(iter(objects_in(text.replace("\n", " "))), {}))

    def post(self, message: Mapping[str, Any]) -> None:
        """Send a message with the token, which is rotated from time to time."""
        token = Path(self.token).read_text(encoding="utf-8").strip()
        request = urllib.request.Request(
            self.url,
            data=json.dumps(message).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        trusted = ssl.create_default_context(cafile=self.certificate)
        urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted).close()
