"""Tokens per second of a language model under our trainer, beside a bare loop; and MFU.

Run as `make bench-language`. Our trainer and a hand-written loop train the model of the task
`chars`, larger on a GPU: in one process and in turn, with equal batch size, precision and
compilation. The hand-written loop never waits for the GPU; ours does so in each step, because no
weight changes before all ranks have agreed that the loss is finite.

Model FLOPs utilisation (MFU) is the floating-point operations per second that the model needs, over
the device's peak. The operations are those of matrix products and attention, forwards and
backwards; torch's own formulas count them in a real pass and, as is usual, take attention for
unmasked.

A GPU's peak is the figure of its vendor's data sheet for bf16 or fp16 on tensor cores, dense: half
of the figure "with sparsity". For any other device or precision, the CPU's included, it is the
speed of the fastest of some large matrix products on this machine.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.trainers import trainer_of
from train.cli.config import Config
from train.dryrun.counters import Flops
from train.parallel.base import DTYPES
from train.tasks.chars import Chars, Sizes

LR = 0.0003
TARGET = 0.98
# TFLOP/s by the words of `torch.cuda.get_device_name()`, the first that fits.
PEAKS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A30": 165,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "V100-PCIE": 112,
    "V100": 125,
    "T4": 65,
}
# On a GPU, on the CPU, and what for.
SIZES = {
    "width": (1024, 128, "numbers per position"),
    "heads": (16, 4, "attention heads"),
    "layers": (12, 2, "blocks"),
    "context": (512, 64, "tokens of a sequence"),
    "batch": (32, 16, "sequences per step"),
    "steps": (20, 10, "steps of each loop in a round"),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both loops do."""

    task: Chars
    """The model and its data."""
    batch: int
    """Sequences per step."""
    device: torch.device
    """Where."""
    precision: str
    """Numbers that matrices are multiplied in."""
    compiled: bool
    """Whether torch.compile is used."""

    @property
    def tokens(self) -> int:
        """Count the tokens of a step."""
        return self.batch * self.task.sizes.context

    @property
    def name(self) -> str:
        """Name the device."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_gpu else "the CPU"

    def autocast(self) -> torch.autocast:
        """Return the context that multiplies matrices in the chosen precision."""
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype, enabled=self.precision != "fp32")


def by_hand(work: Work) -> Callable[[], object]:
    """Return the step of a hand-written loop that is made for speed alone."""
    torch.manual_seed(0)
    model = work.task.model().to(work.device)
    if work.compiled:
        model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=0.01, fused=work.device.type == "cuda" or None
    )
    scaler = torch.amp.GradScaler(work.device.type, enabled=work.precision == "fp16")
    data = work.task.train().to(work.device)

    def step() -> None:
        # Drawn where the data is: nothing is waited for.
        batch = data.take(torch.randint(len(data), (work.batch,), device=work.device))
        with work.autocast():
            scores = model(batch.inputs)
            loss = functional.cross_entropy(scores.flatten(0, -2), batch.targets.flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def ours(work: Work, run_dir: Path) -> Callable[[], object]:
    """Train by our trainer."""
    config = Config(
        run_dir=run_dir,
        global_batch=work.batch,
        lr=LR,
        precision=work.precision,  # type: ignore[arg-type]  # one of DTYPES
        compile=work.compiled,
    )
    return trainer_of(work.task, config, device=work.device).train_step


def now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its queued work.

    On the CPU, where one thread does all, it is the process's own: other programs do not count.
    """
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def flops_per_token(work: Work) -> float:
    """Count the floating-point operations that a token takes, forwards and backwards."""
    model = work.task.model().to(work.device)
    batch = work.task.train().part(0, 1).to(work.device)
    with Flops() as counted:
        with work.autocast():
            scores = model(batch.inputs)
        scores.float().sum().backward()
    total: int = counted.total
    return total / work.task.sizes.context


def peak(work: Work) -> tuple[float, str]:
    """Give the device's operations per second, and where the number is from."""
    if (known := data_sheet(work.name)) and work.precision != "fp32":
        return known * 1e12, "data sheet"
    size = 8192 if work.device.type == "cuda" else 1024
    matrix = torch.ones(size, size, device=work.device, dtype=DTYPES[work.precision])
    times = []
    for _ in range(10):
        started = now(work.device)
        matrix @ matrix
        times.append(now(work.device) - started)
    return 2 * size**3 / min(times), f"the fastest product of {size} x {size} matrices here"


def data_sheet(name: str) -> float:
    """Look a GPU's peak up, in TFLOP/s; 0: not known.

    >>> data_sheet("NVIDIA H100 80GB HBM3"), data_sheet("NVIDIA H100 PCIe")
    (989, 756)
    >>> data_sheet("NVIDIA A100-SXM4-80GB"), data_sheet("NVIDIA A10G")
    (312, 0)
    """
    found = (peak for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name))
    return next(found, 0)


def report(
    work: Work, times: Mapping[str, list[float]], flops: float, most: float, source: str
) -> float:
    """Print both loops' speed; give the ratio, round by round, in the median."""
    how = f"{work.precision}{', compiled' if work.compiled else ''}, {work.tokens} tokens a step"
    size = sum(parameter.numel() for parameter in work.task.model().parameters())
    print(f"{size / 1e6:.1f} million parameters on {work.name}: {how}")
    print(f"{flops:.3g} FLOP a token; peak {most / 1e12:.4g} TFLOP/s ({source})")
    print(f"{'':<8} {'tokens/s':>12} {'':>22} {'MFU':>7}")
    for name, values in times.items():
        low, median, high = (
            work.tokens / seconds
            for seconds in (max(values), statistics.median(values), min(values))
        )
        spread = f"{low:,.0f} to {high:,.0f}"
        print(f"{name:<8} {median:>12,.0f} {spread:>22} {median * flops / most:>7.1%}")
    pairs = zip(times["by hand"], times["ours"], strict=True)
    return statistics.median(hand / own for hand, own in pairs)


def parse() -> argparse.Namespace:
    """Read the command line; defaults follow from the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu or cuda (default: a GPU if there is)")
    for name, (gpu, cpu, meaning) in SIZES.items():
        text = f"{meaning} (default: {gpu} on a GPU, {cpu} on the CPU)"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    text = "of matrix products (default: bf16 on a GPU, or fp16 if it is older; fp32 on the CPU)"
    parser.add_argument("--precision", choices=DTYPES, help=text)
    text = "use torch.compile (default: on a GPU)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default: 15)")
    text = "the device's peak, where it is not known or wrong"
    parser.add_argument("--peak-tflops", type=float, metavar="N", help=text)
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    for name, (gpu, cpu, _) in SIZES.items():
        if getattr(given, name) is None:
            setattr(given, name, gpu if on_gpu else cpu)
    if given.compile is None:
        given.compile = on_gpu
    if given.precision is None:
        half = "bf16" if on_gpu and torch.cuda.is_bf16_supported(False) else "fp16"
        given.precision = half if on_gpu else "fp32"
    return given


def main() -> int:
    """Measure and print; fail when the trainer costs too much."""
    given = parse()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = Sizes(context=given.context, width=given.width, heads=given.heads, layers=given.layers)
    work = Work(
        task=Chars(sizes),
        batch=given.batch,
        device=device,
        precision=given.precision,
        compiled=given.compile,
    )
    flops = flops_per_token(work)
    most, source = peak(work)
    if given.peak_tflops:
        most, source = given.peak_tflops * 1e12, "as given"
    with tempfile.TemporaryDirectory() as folder:
        loops = {"by hand": by_hand(work), "ours": ours(work, Path(folder) / "run")}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for count in range(given.rounds + 1):
            # The one that comes second finds the caches as the first has left them: take turns.
            for name in sorted(loops, reverse=bool(count % 2)):
                started = now(device)
                for _ in range(given.steps):
                    loops[name]()
                seconds = (now(device) - started) / given.steps
                if count:  # the first round compiles, and gets memory
                    times[name].append(seconds)
    ratio = report(work, times, flops, most, source)
    verdict = "met" if ratio >= TARGET else "missed"
    print(f"ours / by hand: {ratio:.3f} (target: at least {TARGET}, {verdict})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
