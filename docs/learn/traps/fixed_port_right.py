import torch.distributed as dist

dist.init_process_group("gloo")
print(f"{dist.get_world_size()} rank")
dist.destroy_process_group()
