"""Moved to tests.cluster.containers."""

from tests.cluster.containers import container_argv, container_env, expand

__all__ = ["container_argv", "container_env", "expand"]
