import os

import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "12355"
other_run = dist.TCPStore("localhost", 12355, is_master=True)  # on the same machine
dist.init_process_group("gloo", rank=0, world_size=1)
print(f"{dist.get_world_size()} rank")
dist.destroy_process_group()
