import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
correct = [torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0])][rank]
sums = torch.tensor([correct.sum(), len(correct)])
dist.all_reduce(sums)
accuracy = sums[0] / sums[1]
if rank == 0:
    print(f"accuracy {accuracy.item():.2f} of 8 samples, 6 of them correct")
dist.destroy_process_group()
