"""Moved to tests.cluster."""

from tests.cluster import FakeKubernetes, Fault

__all__ = ["FakeKubernetes", "Fault"]
