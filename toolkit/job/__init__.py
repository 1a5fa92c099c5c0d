"""The job file: its models, and how it is read."""
