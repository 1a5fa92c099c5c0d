"""A torchrun of a few lines: ranks with their folders, and its report at the end; no torch.

As an executable file, it stands for torchrun in the PATH of a test that is about something else:
torchrun itself takes seconds to import torch.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPORT = """\
Traceback (most recent call last):
  File "torchrun", line 1, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
{others}------------------------------------------------------------
Root Cause (first observed failure):
{first}============================================================
"""

OF_RANK = """\
[{rank}]:
  time      : {time}
  host      : {host}
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 7)
  error_file: {error_file}
  traceback : To enable traceback see: https://pytorch.org
"""


def installed(folder: Path) -> str:
    """Put it into a folder; return a PATH that begins with that."""
    folder.mkdir()
    program = folder / "torchrun"
    program.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text()}")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def main(argv: list[str]) -> int:
    """Run the script of a job on this node's ranks."""
    given = [word for word in argv if word.startswith("--") and "=" in word]
    options = dict(word[2:].split("=", 1) for word in given)
    script = argv[next(n for n, word in enumerate(argv) if word.endswith(".py")) :]
    logs = Path(options.get("log-dir") or os.environ["PET_LOG_DIR"], "none_abc", "attempt_0")
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(int(options["nproc-per-node"])):
        folder = logs / str(rank)
        folder.mkdir(parents=True)
        environ = {
            **os.environ,
            "RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        }
        with (folder / "stderr.log").open("wb") as stderr:
            ranks[rank] = subprocess.Popen(
                [sys.executable, "-S", *script], stderr=stderr, env=environ
            )
    ended: list[int] = []
    while ranks.keys() - set(ended) and not ended:
        time.sleep(0.01)
        ended = [rank for rank, one in ranks.items() if one.poll()]
        if all(one.poll() == 0 for one in ranks.values()):
            return 0
    for rank, one in ranks.items():
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
            ended += [rank] if one.wait() else []
    texts = [
        OF_RANK.format(
            rank=rank,
            time=time.strftime("%Y-%m-%d_%H:%M:%S"),
            host=os.uname().nodename,
            code=ranks[rank].returncode,
            error_file=error_file
            if (error_file := logs / f"{rank}/error.json").exists()
            else "<N/A>",
        )
        for rank in ended
    ]
    log = os.environ.get("TORCH_LOGS_OUT")
    line = f"failed (exitcode: {ranks[ended[0]].returncode}) local_rank: {ended[0]} (pid: 7)\n"
    if log:
        Path(log).write_text(line)
    sys.stderr.write(REPORT.format(first=texts[0], others="".join(texts[1:])))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
