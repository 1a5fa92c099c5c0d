"""Processes that need not import torch: copies of one that has.

Their environment is that of the moment when the first of them was started.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("torch", "torch.distributed.fsdp", "torch.nn.parallel", "train.session", "train.tasks"),
        "torch._dynamo",  # which DistributedDataParallel imports when it is made: 1.2 s
    ]
)
