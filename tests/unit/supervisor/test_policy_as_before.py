"""The supervisor decides as the shell of pods does, until that is gone."""

import functools
import random
import shlex
import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.support.planned import job as job_of
from tests.unit.supervisor.drawn_evidence import Given
from toolkit.rendering.environment import our_environment, template_text
from toolkit.supervisor import policy
from toolkit.supervisor.evidence.first_error import Failure
from toolkit.supervisor.evidence.outcome import read_outcome
from toolkit.supervisor.policy import Limits, Made, Verdict, decide, judge

FAILURES = [
    Failure(kind, step, message)
    for kind in ("error", "fault", "bare", "unsure")
    for step in ("7", "7+", "-")
    for message in ("ValueError: /a 1", "ValueError: /b 2", "signal 9")
]
VARIANTS = [
    (requeue, preemptions, chain)
    for requeue in (0, 2)
    for preemptions in (None, 1)
    for chain in (False, True)
]

STUBS = """
set -uo pipefail
superseded() { [ -n "$S_OVER" ] && _word=fenced _why=$S_OVER; }
stopped() { [ -n "$S_WORD" ] && _word=$S_WORD _why="by that"; }
out_of_memory() { [ -n "$S_MEMORY" ] && printf '%s' "${S_MEMORY#yes}"; }
torchrun_was_killed() { [ -n "$S_KILLED" ] && echo "$S_KILLED"; }
could_not_start() { [ -n "$S_OBSTACLE" ] && _word=$S_OBSTACLE _why=obstacle; }
printed() { for _c in $S_WORKERS; do echo "  exitcode  : $_c (pid: 5)"; done; }
repeated_in_job() { return 1; }
first_error() { cat >/dev/null; printf '%s' "$S_ERROR"; [ -z "$S_ERROR" ] || echo; }
earlier_error() { same_failure "$S_EARLIER" "$1" && _earlier=$S_EARLIER || _earlier=''; }
chain_goes_on() { true; }
outcome_is_current() { [ "`outcome attempt`" = "$_attempt" ]; }
attempt_failed() {
  case `sed 's/:.*//' "$1/reason" 2>/dev/null`:`cat "$1/step" 2>/dev/null` in
    retryable:* | node_failure:* | lost:* | walltime:) ;;
    *) return 1 ;;
  esac
}
_again="queued again" _since=0 _twice='' _queued=''
"""


@functools.cache
def functions(requeue: int, preemptions: int | None, chain: bool) -> str:
    """Return the shell of the retry policy."""
    retries = {"requeue": requeue, "in_job": 2, "preemptions": preemptions}
    plan = toolkit.plan(job_of(retries=retries), toolkit.SlurmProfile(name="s"))
    plan = plan.in_turns() if chain else plan
    policy = our_environment().get_template("common/retry_policy.sh.j2").render(plan=plan)
    return policy + "\n" + template_text("common/first_error.sh")


def draw(dice: random.Random, run_dir: Path) -> tuple[str, Given, list[Made]]:
    """Return an attempt that has ended as shell, as evidence, and with the attempts before it."""
    number = dice.choice([0, 0, 1, 2, 3])
    logs = run_dir / f"logs/attempt-{number}"
    logs.mkdir(parents=True)
    given = Given(status=dice.choice([0, 1, 2, 75, 126, 127, 137]))
    if dice.random() < 0.7:
        status = dice.choice(["running", "done", "fatal", "retryable", "preempted"])
        rank = dice.choice(["null", "0"])
        reason = dice.choice([r"\"it\" \\ was", "bad flag"])
        (run_dir / "outcome.json").write_text(
            f'{{\n  "version": 1,\n  "status": "{status}",\n  "attempt": {number},\n'
            f'  "step": 7,\n  "rank": {rank},\n  "reason": "{reason}"\n}}\n'
        )
        given.outcome = read_outcome(str(run_dir))

    def rarely(value: str) -> str:
        return value if dice.random() < 0.12 else ""

    given.stopping = dice.choice(["", "", "walltime"])
    given.disk = rarely(str(run_dir))
    given.began = dice.random() < 0.5
    if given.began:
        (logs / "node-0/x/attempt_0").mkdir(parents=True)
    shell = {"S_OVER": rarely("attempt 9 has taken over")}
    given.taken_over = Verdict("fenced", shell["S_OVER"]) if shell["S_OVER"] else None
    if dice.random() < 0.1:
        given.in_job = dice.choice(FAILURES)
        (logs / "repeated").write_text(given.in_job.line() + "\n")
    given.workers = dice.choice([[], [], [1], [2, 1], [93]])
    shell["S_WORKERS"] = " ".join(map(str, given.workers))
    if dice.random() < 0.05:
        given.idle = True
        (logs / "no_progress").touch()
    shell["S_WORD"] = rarely(dice.choice(["node_failure", "preempted", "cancelled", "walltime"]))
    given.stopper = Verdict(shell["S_WORD"], "by that") if shell["S_WORD"] else None
    shell["S_MEMORY"] = rarely(dice.choice(["yes", "yesnode 1"]))
    given.memory = shell["S_MEMORY"].removeprefix("yes") if shell["S_MEMORY"] else None
    shell["S_KILLED"] = rarely("node2")
    given.killed_on = shell["S_KILLED"] or None
    shell["S_OBSTACLE"] = rarely(dice.choice(["fatal", "retryable"]))
    given.obstacle = Verdict(shell["S_OBSTACLE"], "obstacle") if shell["S_OBSTACLE"] else None
    given.error = dice.choice([None, *FAILURES])
    given.earlier = dice.choice([None, given.error, *FAILURES[:4]])
    shell["S_ERROR"] = given.error.line() if given.error else ""
    shell["S_EARLIER"] = given.earlier.line() if given.earlier else ""
    before = []
    for attempt in range(number):
        word = dice.choice(["retryable", "lost", "node_failure", "preempted", "walltime"])
        made = Made(word, dice.choice([None, 3, 7, 9]))
        before.append(made)
        folder = run_dir / f"logs/attempt-{attempt}"
        folder.mkdir()
        (folder / "reason").write_text(f"{word}: so\n")
        if made.step is not None:
            (folder / "step").write_text(f"{made.step}\n")
    values = {
        "_run_dir": str(run_dir), "_attempt": str(number), "_logs": str(logs),
        "_own_logs": str(logs), "_stopping": given.stopping, "_disk_full": given.disk, **shell,
    }  # fmt: skip
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join(lines) + f"\nclassify {given.status}\n{FOLLOWS}", given, before


FOLLOWS = """
echo "$_word: deciding" >"$_logs/reason"
! outcome_is_current || outcome step >"$_logs/step"
echo "$_word: $_why"
_follows=
! decide || _follows=!
echo "$_word: $_decision$_follows"
"""


@pytest.mark.parametrize("count", [4, pytest.param(1_250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=map(str, VARIANTS))
def test_each_drawn_attempt_ends_as_before(tmp_path: Path, count: int, variant: int) -> None:
    requeue, preemptions, chain = VARIANTS[variant]
    shell = [functions(requeue, preemptions, chain), STUBS]
    cases = []
    for number in range(count):
        run_dir = tmp_path / f"{number}"
        text, given, before = draw(random.Random(f"{variant}/{number}"), run_dir)
        shell.append(f"(\n{text})\n")
        cases.append((given, before))
    done = subprocess.run(
        ["bash", "-s"], input="\n".join(shell), text=True, capture_output=True, check=False
    )
    answers = done.stdout.splitlines()
    assert len(answers) == 2 * count, done.stderr
    limits = Limits(requeue, preemptions=preemptions, by_others=chain and not requeue)
    for number, (given, before) in enumerate(cases):
        verdict = judge(given)
        step = given.outcome.step if given.outcome else ""
        attempts = [*before, Made(verdict.word, int(step) if step else None)]
        follows = decide(verdict.word, policy.count(attempts), limits, again="queued again")
        assert [
            f"{verdict.word}: {verdict.why}",
            f"{follows.word}: {follows.text}" + "!" * follows.again,
        ] == answers[2 * number : 2 * number + 2], (number, given)
