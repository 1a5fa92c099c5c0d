"""The rules for training scripts, by topic."""
