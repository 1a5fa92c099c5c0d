"""The old name of `toolkit.functions`, for jobs that version 0.1 pickled."""

import sys

from toolkit.functions import job

sys.modules["toolkit.executors.jobs"] = job
