"""Checkpoints: each rank's tensors as safetensors, all else as JSON, a manifest that proves it.

`disk` is what lies where; `planning` who writes what; `staging` and `checkpointer` how it gets
there while training goes on; `stored` how it comes back, on whatever layout.
"""
