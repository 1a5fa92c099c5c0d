"""The rules for training scripts, by what they are about."""
