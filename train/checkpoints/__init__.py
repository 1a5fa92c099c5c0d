"""Checkpoints: each rank's tensors as safetensors, all else as JSON, a manifest that proves it.

`store` is the layout on disk; `planner` decides which rank writes which part, and copies the parts;
`checkpointer` writes them while training continues; `retention` decides how long a checkpoint
stays; `reader` reads it, on any layout.
"""
