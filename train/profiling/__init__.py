"""Traces of steps, and the time spent per activity."""
