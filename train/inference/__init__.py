"""Using a trained model: evaluation and prediction over all ranks, even while the run is active."""
