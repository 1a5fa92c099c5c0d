"""The commands a batch script calls, replaced by ones that record: real bash, no cluster.

The script is started as slurmd would start it. `srun` runs its command once per node, one after
the other; `torchrun` writes down the arguments and the environment it was given.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SRUN = """#!{python} -SE
import os, subprocess, sys
words = sys.argv[1:]
options = []
while words[0].startswith("--"):
    options.append(words.pop(0))
nodes = next(int(o.split("=")[1]) for o in options if o.startswith("--nodes="))
for node in range(nodes):
    own = dict(SLURM_NODEID=str(node), SLURMD_NODENAME=f"node{{node + 1}}", SLURM_STEP_ID="3")
    environ = dict(os.environ, **own)
    done = subprocess.run(words, env=environ)
    if done.returncode:
        sys.exit(done.returncode)
"""

_TORCHRUN = """#!{python} -SE
import json, os, sys
# On this machine all of them start at once: only their arguments say which is which.
folder = next((word for word in sys.argv if word.startswith("--log-dir=")), "-0")
node = os.environ.get("SLURM_NODEID") or folder.rpartition("-")[2]
record = {{"argv": sys.argv[1:], "env": dict(os.environ)}}
with open({dumps!r} + "/" + node, "w") as file:
    json.dump(record, file)
"""

_SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames")
    echo "${{3%%,*}}"
    i=1; while [ $i -le {nodes} ]; do echo node$i; i=$((i + 1)); done
    echo "${{3##*,}}" ;;
esac
"""


@dataclass(frozen=True)
class Seen:
    """The options and environment of one torchrun."""

    argv: list[str]
    env: dict[str, str]


def install(folder: Path, *, nodes: int) -> dict[str, str]:
    """Write the commands below `folder` and return an environment that finds them first."""
    dumps = folder / "dumps"
    commands = folder / "bin"
    for made in (dumps, commands):
        made.mkdir(parents=True, exist_ok=True)
    texts = {
        "srun": _SRUN.format(python=sys.executable),
        "torchrun": _TORCHRUN.format(python=sys.executable, dumps=str(dumps)),
        "scontrol": _SCONTROL.format(nodes=nodes),
        "getent": "#!/bin/sh\nexit 0\n",
        "scancel": "#!/bin/sh\n",
        "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',  # which has the toolkit
    }
    for name, text in texts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_CPUS_PER_TASK": "1",
    }


def execute(
    script: str, folder: Path, *, nodes: int, run_dir: Path, more: Mapping[str, str] | None = None
) -> list[Seen]:
    """Run a rendered script under bash and return what each torchrun saw, in node order."""
    environ = install(folder, nodes=nodes) | dict(more or {})
    for old in (folder / "dumps").iterdir():
        old.unlink()
    path = folder / "script.sh"
    path.write_text(script)
    done = subprocess.run(
        ["bash", path, run_dir], env=environ, cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
    dumps = sorted((folder / "dumps").iterdir(), key=lambda dump: int(dump.name))
    return [Seen(**json.loads(dump.read_text())) for dump in dumps]
