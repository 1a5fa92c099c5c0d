"""The command line of `python -m train`: flags, config files, and what cannot be combined."""
