"""A run loads its own strategy, and nothing that only other runs need."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.train.conftest import Start

# What torch itself loads cannot be left out: an optimizer and DDP need torch._dynamo, and with it
# sympy and torch.distributed.tensor, beside which the rest of DCP takes 50 ms.
OF_OTHERS = (
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.utils.flop_counter",
    "torch._inductor.compile_fx",
    "train.collectives",
    "train.dryrun",
    "train.failure.diagnose",
)
OF_DDP = {
    "base", "checksum", "consistency", "ddp", "layout", "pipeline", "pipeline.split", "replacement",
    "sparse_exchange", "watch", "writes",
}  # fmt: skip
RUN = """
import json, pathlib, sys
from train.__main__ import main
status = main()
pathlib.Path("modules.json").write_text(json.dumps(sorted(sys.modules)))
sys.exit(status)
"""


def test_a_run_of_ddp_loads_no_other_strategy(start: Start, tmp_path: Path) -> None:
    flags = ["--strategy=ddp", "--steps=3", f"--init-method=file://{tmp_path}/rendezvous"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    start.command([sys.executable, "-c", RUN, *flags], tmp_path / "run", 0, ranks).finish()
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert [name for name in modules if name.startswith(OF_OTHERS)] == []
    ours = "train.parallel."
    assert {name.removeprefix(ours) for name in modules if name.startswith(ours)} == OF_DDP
