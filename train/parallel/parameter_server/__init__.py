"""A parameter server: one rank holds the model, the others compute gradients for it.

`pacing` who may begin which update, in whole numbers
`server` what trainers call: draw work, push gradients; one lock
`wire`   the calls themselves, over torch.distributed.rpc
`loop`   the training loop, as the server runs it and as a trainer does
"""
