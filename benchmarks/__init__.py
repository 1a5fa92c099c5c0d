"""Measurements beside peers and floors, interleaved in one run."""
