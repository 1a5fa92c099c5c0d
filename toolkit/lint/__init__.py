"""Rules for hand-written batch scripts, manifests and training scripts."""
