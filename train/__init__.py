"""A trainer to start from: `torchrun … -m train`, or `python -m train` for one process.

It knows nothing of what launched it beyond torchrun's environment, its own command line and the run
directory (`docs/reference/run-directory.md`).
"""
