"""The records of a run: its submission, its run directory, its output."""
