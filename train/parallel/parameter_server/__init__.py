"""A parameter server: one rank holds the model, the others compute gradients for it.

`server`   when a trainer may start an update, and the methods that trainers call, under one lock
`wire`     the calls over torch.distributed.rpc
`strategy` the model on the server and on a trainer, and the training loop of both
"""
