"""Kubernetes manifests: their values with line numbers, and their rules."""
