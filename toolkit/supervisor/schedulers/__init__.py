"""The facts and actions of a place that runs jobs."""
