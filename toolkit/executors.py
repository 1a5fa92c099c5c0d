"""The name that `toolkit.functions` had in version 0.1, for jobs that were pickled then."""

import sys

from toolkit.functions import job

sys.modules["toolkit.executors.jobs"] = job
