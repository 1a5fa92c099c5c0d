"""The program around torchrun: it decides what follows when a rank, a node or the scheduler fails.

It uses the standard library alone, imports nothing of the toolkit, and runs on Python 3.6, which
is what batch hosts have. Its rules are in `policy`; what the rules look at is in `evidence`.
"""
