"""Traces of the profiler, and one timeline of all ranks."""
