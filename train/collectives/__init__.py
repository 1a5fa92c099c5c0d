"""The collectives of torch.distributed, explained by a run: `python -m train.collectives`."""
