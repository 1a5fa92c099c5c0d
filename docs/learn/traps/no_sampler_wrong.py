import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = list(range(8))
loader = DataLoader(data, batch_size=2, shuffle=True)
print(f"rank {rank}:", [batch.tolist() for batch in loader])
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
