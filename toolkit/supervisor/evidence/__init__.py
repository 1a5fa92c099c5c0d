"""Readers of an attempt's evidence: outcome.json, torchrun reports, errors of ranks."""
