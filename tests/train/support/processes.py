"""Processes that need not import torch: copies of one that has.

Their environment is that of the moment when the first of them was started.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # which the first optimizer or DistributedDataParallel imports: 1.2 s
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "sklearn.datasets",
        "train.session",
        "train.tasks",
    ]
)
