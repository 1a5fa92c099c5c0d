"""Kubernetes manifests: their values with line numbers, and the rules for them."""
