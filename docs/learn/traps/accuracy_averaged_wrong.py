import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
correct = [torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0])][rank]
accuracy = correct.mean()
dist.all_reduce(accuracy)
accuracy /= dist.get_world_size()
if rank == 0:
    print(f"accuracy {accuracy.item():.2f} of 8 samples, 6 of them correct")
dist.destroy_process_group()
