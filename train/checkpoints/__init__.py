"""Checkpoints: each rank's tensors as safetensors, all else as JSON, a manifest that proves it.

`disk` is what lies where; `planning` who writes what; `staging`, `job` and `checkpointer` how it
gets there while training goes on; `retention` how long it stays; `stored` how it comes back, on
whatever layout.
"""
