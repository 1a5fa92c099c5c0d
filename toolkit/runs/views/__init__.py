"""What people and other programs are shown of runs: reports, curves, goodput, notifications."""
