"""Write the table of faults in docs/how-to/failures.md, from running each fault once.

`make faults` runs all of them, `make faults ARGS="--only torchrun"` those whose name has this word;
the rows of the others stay as they are.
"""

import argparse
import os
import random
import re
import sys
import tempfile
import traceback
from pathlib import Path

from tests.conftest import ROOT
from tests.system.chaos.arena import Arena
from tests.system.chaos.faults import ANOTHER, FAULTS, FINAL, IN_PLACE, UNHURT, Fault
from tests.system.chaos.frame import Trial
from tests.system.chaos.play import (
    Arenas,
    Blow,
    Broken,
    Course,
    Score,
    matching,
    play,
    reference_run,
)
from toolkit.supervisor.policy import sentence

PAGE = ROOT / "docs/how-to/failures.md"
BEGIN, END = "<!-- faults: `make faults` writes this table -->", "<!-- end of the faults -->"
HEAD = (
    "| what happens | where | what you see | what follows | what it costs |\n"
    "|---|---|---|---|---|\n"
)
PLACES = {"slurm": "Slurm", "pods": "Kubernetes", "local": "this machine"}
NOT_RUN = "not run yet"
_LONGEST = 120
"""Characters of a reason, and of what was decided."""


def rows(page: str) -> dict[str, str]:
    """Return the rows of the table by what happens."""
    table = page.partition(f"{BEGIN}\n")[2].partition(END)[0].removeprefix(HEAD)
    return {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}


def row(fault: Fault, seen: str, follows: str, costs: str) -> str:
    """Return the row of a fault."""
    cells = (fault.what, PLACES[fault.place], seen, follows, costs)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def written(page: str, new: dict[str, str]) -> str:
    """Return the page with new rows, and with a row for each fault in the order of the data."""
    known = {**rows(page), **new}
    lines = [known.get(f.what, row(f, NOT_RUN, NOT_RUN, NOT_RUN)) for f in FAULTS]
    before, _, rest = page.partition(f"{BEGIN}\n")
    return (
        f"{before}{BEGIN}\n{HEAD}"
        + "".join(f"{line}\n" for line in lines)
        + END
        + (rest.partition(END)[2])
    )


def alone(fault: Fault) -> Score:
    """Return the run in which a fault hits once, after a checkpoint."""
    return Score(
        place=fault.place,
        blows=(Blow(fault=fault, moment="training", delay_s=1.0),),
        overrides=("retries.in_job=0", "retries.requeue=3", "stop.grace=20s"),
    )


def run_alone(arena: Arena, fault: Fault, reference: Trial) -> tuple[Course, str]:
    """Run a fault alone; return what was seen, and what followed.

    Raises:
        Broken: something else followed than the data of the fault allows.
    """
    course = play(arena, alone(fault), reference, random.Random(fault.what))
    if not course.hits:
        raise Broken("there was nothing to hit")
    follows = what_followed(course)
    if follows not in fault.follows:
        wanted = sorted(fault.follows)
        raise Broken(f"{follows!r} followed, not one of {wanted}: {told(course)}")
    # Of a restart in the job only the log tells.
    if fault.reasons and follows not in (IN_PLACE, UNHURT):
        texts = told(course)
        if not any(re.search(fault.reasons[0], text) for text in texts):
            raise Broken(f"no reason says {fault.reasons[0]!r}: {texts}")
    return course, follows


def told(course: Course) -> list[str]:
    """Return what the reasons of the attempts, one by one, and the statuses said."""
    parts = [part for reason in course.reasons for part in reason.split(" | ")]
    return [text for text in (*parts, *course.seen, course.first_end.reason) if text]


def what_followed(course: Course) -> str:
    """Return what followed from the only fault of a run."""
    if course.first_end.state != "succeeded":
        return FINAL
    if len(course.reasons) > 1:
        return ANOTHER
    return IN_PLACE if course.restarts else UNHURT


def shown(fault: Fault, course: Course, follows: str) -> str:
    """Return what a user sees: the state at the end of the attempt, and the reason."""
    text = matching(fault, told(course))
    state = course.first_end.state.upper() if follows == FINAL else "RUNNING"
    return f"{state}: {quoted(text)}" if text else f"{state}, no message"


def quoted(text: str) -> str:
    """Return a reason as code, without what differs from machine to machine."""
    line = sentence(re.sub(r"^[A-Z]+: ", "", text.strip()).splitlines()[0])
    line = re.sub(r" \[\[?/.*\]", "", line)  # what the library said, with lines of its source
    line = re.sub(r"/[\w./-]*/counted-\d+-\d+-\w+", "RUN_DIR", line)
    line = re.sub(r"counted-\d+-\d+-\w+", "RUN", line).replace(f"{ROOT}/", "")
    line = re.sub(r"\b\d{8}\b", "JOB_ID", line)  # of the sandbox, counted from a random one
    if len(line) > _LONGEST:
        head, _, decision = line.rpartition("; ")
        line = f"{head[:_LONGEST].rpartition(' ')[0]} …; {decision[:_LONGEST]}"
    if "`" not in line:
        return f"`{line}`"
    # A space keeps a backtick at an end apart from the fence; Markdown takes the space away.
    return f"`` {line} ``" if "`" in (line[0], line[-1]) else f"``{line}``"


def costs(course: Course, follows: str, destroys: bool) -> str:
    """Return the attempts and steps that a fault has cost."""
    if destroys:
        return "the run"
    again = "the steps since the last checkpoint" if course.steps_again > 0 else "no step"
    starts = {ANOTHER: len(course.reasons) - 1, IN_PLACE: 0, UNHURT: 0, FINAL: 0}[follows]
    words = {ANOTHER: f"{starts} attempt{'s' * (starts > 1)}", IN_PLACE: "a restart in the job"}
    return f"{words[follows]}, {again}" if follows in words else again


def main() -> int:
    """Run faults and write their rows; return whether one of them was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the name of the faults to run")
    parser.add_argument("--place", default="", choices=["", *PLACES])
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    broken = 0
    PAGE.write_text(written(PAGE.read_text(), {}))
    with Arenas(folder) as arenas:
        reference = reference_run(folder / "reference")
        for fault in FAULTS:
            if given.only not in fault.what or given.place not in ("", fault.place):
                continue
            try:
                arena = arenas.get(fault.place)
                if not arena.offers(fault.need):
                    print(f"{fault.what}: not here, needs {fault.need}", flush=True)
                    continue
                course, follows = run_alone(arena, fault, reference)
            except Exception as error:
                print(f"{fault.what}: BROKEN: {error}", flush=True)
                if not isinstance(error, Broken):
                    traceback.print_exc(file=sys.stdout)
                broken += 1
                arenas.drop(fault.place)
                continue
            cost = costs(course, follows, fault.destroys)
            line = row(fault, shown(fault, course, follows), follows, cost)
            print(line, flush=True)
            PAGE.write_text(written(PAGE.read_text(), {fault.what: line}))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
