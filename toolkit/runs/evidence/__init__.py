"""What is found out of a run from its records: how far it is, what hangs, what failed first."""
