"""Using a trained model: evaluation and prediction over all ranks, beside a run that may go on."""
