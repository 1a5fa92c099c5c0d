"""Rules for batch scripts and manifests that people have written."""
