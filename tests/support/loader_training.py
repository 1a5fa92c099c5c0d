"""A training script as people write it: DDP, a DataLoader with workers, and a handler of SIGTERM.

`loader_training.py fork|spawn|forkserver STEPS`: saves when it is told to stop, and resumes.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Numbers that take a moment to load."""

    def __len__(self) -> int:
        """Return more than any test reads."""
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        """Load a sample."""
        time.sleep(0.02)
        return torch.tensor([float(index % 7)])


def main() -> None:
    """Train until the steps are made, or until SIGTERM."""
    context, steps = sys.argv[1], int(sys.argv[2])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    path, step = Path(os.environ["TRAIN_RUN_DIR"], "checkpoint.pt"), 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        step = int(saved["step"])
        print(f"resumed at step {step}", flush=True)
    loader = DataLoader(
        Samples(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )
    for batch in loader:
        if step >= steps:
            break
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
        print(f"step {step}", flush=True)
        stops = torch.tensor(float(bool(told)))
        dist.all_reduce(stops)
        if stops:
            if dist.get_rank() == 0:
                draft = path.with_suffix(".draft")
                torch.save({"model": model.state_dict(), "step": step}, draft)
                draft.rename(path)
                draft.write_text(f"{step}\n", encoding="utf-8")
                draft.rename(path.with_name("saved"))
            dist.destroy_process_group()
            sys.exit(143)
    dist.destroy_process_group()
    print("trained", flush=True)


if __name__ == "__main__":
    main()
