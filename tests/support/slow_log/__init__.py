"""A job whose torchrun loses the signal to stop, which comes while it writes its log."""

from pathlib import Path

import toolkit


def lost_signal(**resources: object) -> toolkit.JobSpec:
    """Return a job whose rank fails once, and would then run for long.

    The folder of this module holds the `sitecustomize` that makes torchrun's log slow. A rank
    leaves `started-N` in the run directory, with the number of torchrun's restart.
    """
    ends = '[ "$TORCHELASTIC_RESTART_COUNT" != 0 ] || exit 1; exec sleep 1000'
    return toolkit.JobSpec.model_validate(
        {
            "name": "lost",
            "command": [
                *("bash", "-c"),
                f'touch "$TRAIN_RUN_DIR/started-$TORCHELASTIC_RESTART_COUNT"; {ends}',
            ],
            "resources": resources,
            "retries": {"in_job": 1},
            "stop": {"grace": "1s"},
            "env": {"PYTHONPATH": str(Path(__file__).parent)},
        }
    )
