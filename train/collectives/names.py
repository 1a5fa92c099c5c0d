"""The names of the collectives, without importing torch."""

SIZED = (
    "all_reduce",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
"""Collectives that move numbers, and therefore have a table of sizes."""

NAMES = (*SIZED, "barrier", "monitored_barrier")
