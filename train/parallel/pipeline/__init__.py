"""A pipeline: the model cut in stages, and micro-batches on their way through them."""
