"""`python -m train.collectives`: each collective explained, checked and measured by a run."""

import os
import sys

from ..errors import EXIT_DONE, UsageError
from ..rundir.console import Console, end_process, keep_lines_whole
from ..runtime.rank import RankInfo
from .options import parse, parser


def main() -> int:
    """Run, and return the exit status."""
    console = Console(rank=0)
    try:
        rank_info = RankInfo.from_environ(os.environ)
        console = Console(rank=rank_info.rank)
        if {"--help", "-h"} & set(sys.argv[1:]):
            console.say(parser().format_help().rstrip())
            return EXIT_DONE
        options = parse(sys.argv[1:], rank_info)
    except UsageError as error:
        console.complain(str(error))
        return error.exit_status
    # Import this late, as it imports torch: a mistyped flag is then reported at once.
    from .session import be_a_rank, spawn

    return spawn(options, options.nproc) if options.nproc else be_a_rank(options, rank_info)


if __name__ == "__main__":
    keep_lines_whole()
    end_process(main())
