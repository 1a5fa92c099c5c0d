"""Checkpoints: each rank's tensors as safetensors, all else as JSON, a manifest that proves it.

`store` is the layout on disk; `planner` decides which rank writes which part; `staging`, `job` and
`checkpointer` write it while training continues; `retention` decides how long it stays; `reader`
reads it, on any layout.
"""
