"""Records of runs that a test has submitted nowhere."""

import time
from pathlib import Path

from toolkit.profile import Profile
from toolkit.runs.records import registry


def remember(
    uri: str,
    *,
    name: str,
    job: str,
    profile: Profile,
    run_dir: Path | None = None,
    remote_dir: str | None = None,
) -> registry.RunRecord:
    """Record a run as if it was submitted just now."""
    record = registry.RunRecord(
        uri=uri,
        name=name,
        job=job,
        profile=profile.model_dump(mode="json", by_alias=True),
        created=time.time(),
        run_dir=run_dir,
        remote_dir=remote_dir,
    )
    return registry.add(record)
