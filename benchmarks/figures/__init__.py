"""The figures of docs/learn: `make figures` measures, draws them, and writes their tables."""
