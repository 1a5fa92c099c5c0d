"""`python -m train.cli.check`: check the command lines of a job without running them.

`toolkit check` calls it. It reads one JSON object from standard input: `argvs`, a list of command
lines; `world_size` and `local_world_size`; `here`, whether the command lines are for this machine,
so that the files they name must exist. It prints a list of problems for each command line. It
imports nothing that a command line names, and reads only a configuration below the folder.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..runtime.rank import RankInfo
from . import flags


def problems(argv: Sequence[str], rank_info: RankInfo, *, here: bool) -> list[str]:
    """List the errors that `flags.parse()` would report, as far as they can be known."""
    if {"--help", "-h"} & set(argv):
        return []
    if not here:
        argv = _without_tasks(argv)
    found: list[str] = []
    _, texts = flags.tokens(argv, found)
    config = texts.get("--config")
    if config is not None and not _is_below(Path(config), Path.cwd()):
        # The file's settings are not known, so check each flag by itself.
        for flag, text in texts.items():
            if flag not in flags.FILES:
                try:
                    flags.fields_by_flag()[flag].parse(text)
                except ValueError as error:
                    found.append(str(error))
        if here and not Path(config).exists():
            found.append(f"--config {config}: {os.strerror(2)}")
        return found
    try:
        flags.parse(argv, {flags.RUN_DIR: "run"}, rank_info)
    except UsageError as error:
        return str(error).split("\n")
    return []


def _without_tasks(argv: Sequence[str]) -> list[str]:
    """Replace a task in a file: the file may exist only on the machine that runs the job."""
    words: list[str] = []
    for word in argv:
        flag, equals, name = word.partition("=")
        if not equals:
            flag, name = words[-1] if words else "", word
        file, _, attribute = name.rpartition(":")
        if flag == "--task" and attribute.isidentifier() and file.endswith(".py"):
            word = "--task=digits" if equals else "digits"
        words.append(word)
    return words


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a path is a file in a folder, links resolved."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def main() -> None:
    """Answer a request."""
    request = json.load(sys.stdin)
    rank_info = RankInfo(
        world_size=request["world_size"],
        local_world_size=request["local_world_size"],
        launched=True,
        addressed=True,
    )
    answers = [problems(argv, rank_info, here=request["here"]) for argv in request["argvs"]]
    # Mark the answer: a site's Python may print as well.
    print(f"\n==problems|{json.dumps(answers)}|==")


if __name__ == "__main__":
    main()
