"""A parameter server: one rank holds the model, the others compute gradients for it.

`server`   who may begin which update, in whole numbers; what trainers call, under one lock
`wire`     the calls themselves, over torch.distributed.rpc
`strategy` the model on the server and on a trainer, and the training loop of both
"""
