"""Moved to tests.cluster.pytorchjobs."""

from tests.cluster.pytorchjobs import JOB_LABEL

__all__ = ["JOB_LABEL"]
