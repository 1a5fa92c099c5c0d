"""Kubernetes manifests: what they say, line by line, and the rules that they are held to."""
