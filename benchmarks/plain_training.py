"""What a person writes without the toolkit: DDP, torch.save every few steps, and go on from there.

Run by torchrun in `benchmarks/recovery.py`, for which it notes when it has imported, met, loaded
and stepped; and in `benchmarks/goodput.py`, for which telemetry notes where the time goes.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.telemetry import Telemetry

STEPS, EVERY = (int(os.environ.get(name, given)) for name, given in (("STEPS", 300), ("EVERY", 10)))
FOLDER = Path(os.environ["COUNTED"])


def note(what: str, step: int = 0) -> None:
    """Append a line with the time, of rank 0 alone."""
    if os.environ["RANK"] == "0":
        with (FOLDER / "stamps.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "step": step, "time": time.time()}) + "\n")


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a regression on noise."""
    inputs = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def layers() -> torch.nn.Module:
    """Return the model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    note("imported")
    telemetry = Telemetry()
    dist.init_process_group("gloo")
    inputs, targets = samples()
    model, path, first = DistributedDataParallel(layers()), FOLDER / "checkpoint.pt", 1
    note("met")  # DDP has connected the ranks
    optimizer = torch.optim.AdamW(model.parameters())
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    note("loaded", first - 1)
    telemetry.ready()
    for step in range(first, STEPS + 1):
        batch = torch.arange(8) + 8 * dist.get_rank() + 16 * step
        loss = torch.nn.functional.mse_loss(model(inputs[batch % 1000]), targets[batch % 1000])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        optimizer.step()
        telemetry.step(step)
        if step % EVERY == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with telemetry.during("checkpoint"):
                torch.save(state, FOLDER / "checkpoint.new")
                (FOLDER / "checkpoint.new").replace(path)
        note("step", step)
        time.sleep(float((FOLDER / "pace").read_text()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
