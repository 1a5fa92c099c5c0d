"""What is written down of a run: the record of its submission, its run directory, its output."""
