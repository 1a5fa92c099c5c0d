"""Views of runs for people and other programs: reports, curves, goodput, notifications."""
