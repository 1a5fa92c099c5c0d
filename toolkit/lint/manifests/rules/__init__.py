"""The rules for manifests, by topic."""
