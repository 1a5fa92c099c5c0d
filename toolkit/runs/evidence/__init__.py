"""Evidence from the records of a run: progress, stalls, first failure."""
