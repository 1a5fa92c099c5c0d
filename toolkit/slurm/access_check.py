"""What a user may do at a Slurm site: accounts, QOS, folders, and sbatch's word on a script."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from subprocess import CompletedProcess

from toolkit.errors import LauncherError, Problem

__all__ = ["account_findings", "log_folder", "path_findings", "verdict"]

_TEST_ONLY = "sbatch --test-only"

_SUBMIT = """
umask 077
file=$(mktemp) || exit
printf %s "$@" >"$file" && sbatch --test-only "$file"
status=$?
rm -f "$file"
exit $status
"""
"""The script goes there as words, so that this works on a login node far away, too."""

_WORD_MAX = 100_000  # bytes; Linux takes 128 KiB for one argument

_PLACES = """
for word; do
  kind=${word%%:*} path=${word#*:} fault=
  case $path in '~/'*) path=$HOME/${path#'~/'} ;; esac
  case $kind in
    makes)
      up=$path
      while [ ! -e "$up" ] && [ "$up" != . ] && [ "$up" != / ]; do up=$(dirname -- "$up"); done
      if [ ! -d "$up" ]; then fault="$up is no folder"
      elif [ ! -w "$up" ]; then fault="$up cannot be written"; fi ;;
    writes)
      if [ ! -d "$path" ]; then fault="there is no such folder"
      elif [ ! -w "$path" ]; then fault="it cannot be written"; fi ;;
    folder) [ -d "$path" ] || fault="there is no such folder" ;;
    file) [ -e "$path" ] || fault="there is no such file" ;;
  esac
  printf '%s\\n' "$fault"
done
"""

Command = Callable[[Sequence[str]], "CompletedProcess[str]"]


def account_findings(
    options: dict[str, str | None], command: Command, *, place: Callable[[str], str]
) -> list[Problem]:
    """Compare account and QOS with the user's associations; nothing without accounting.

    Args:
        options: The options of sbatch, by long names.
        command: How Slurm's commands are run.
        place: Where an option stands.
    """
    wanted = {name: options.get(name) for name in ("account", "qos")}
    if not any(wanted.values()):
        return []
    config = command(["scontrol", "show", "config"]).stdout
    enforced = re.search(r"^AccountingStorageEnforce *= *(.*)$", config, re.MULTILINE)
    rules = set((enforced[1] if enforced else "none").strip().split(","))
    try:
        user = command(["id", "-un"]).stdout.strip()
        query = ["show", "assoc", f"user={user}", "format=account,qos"]
        answer = command(["sacctmgr", "-nP", *query])
    except LauncherError:
        return []
    rows = [line.split("|") for line in answer.stdout.splitlines() if "|" in line]
    if answer.returncode != 0 or not rows:
        return []
    mine = sorted({row[0] for row in rows if row[0]})
    problems = []
    if wanted["account"] and wanted["account"] not in mine and "associations" in rules:
        message = f"{user} has no account {wanted['account']!r}; name one of {', '.join(mine)}"
        problems.append(Problem(rule="site-account", place=place("account"), message=message))
    own = [row for row in rows if row[0] == wanted["account"]] or rows
    allowed = sorted({qos for row in own for qos in row[1].split(",") if qos})
    if wanted["qos"] and allowed and wanted["qos"] not in allowed and "qos" in rules:
        message = f"{user} has no QOS {wanted['qos']!r}; name one of {', '.join(allowed)}"
        problems.append(Problem(rule="site-qos", place=place("qos"), message=message))
    return problems


def verdict(script: str, command: Command, *, place: str | None = None) -> list[Problem]:
    """Have sbatch look at a script as if it were submitted (`--test-only`).

    Args:
        script: Its text.
        command: How Slurm's commands are run.
        place: Where the script stands.
    """
    data = script.encode()
    chunks, at = [], 0
    while at < len(data):
        end = min(at + _WORD_MAX, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:  # not inside of a character
            end -= 1
        chunks.append(data[at:end].decode())
        at = end
    done = command(["sh", "-c", _SUBMIT, "sh", *chunks])
    if done.returncode == 0:
        return []
    if done.returncode == 127 or "Unable to contact" in done.stderr:
        raise LauncherError(f"sbatch cannot be asked: {done.stderr.strip()}")
    lines = [re.sub(r"^(\S*sbatch: )?(error: )?", "", row) for row in done.stderr.splitlines()]
    messages = [row for row in lines if row and not row.startswith("Try ")]
    message = f"{_TEST_ONLY} refuses it: {'; '.join(messages) or 'without a word'}"
    return [Problem(rule="site-refuses", place=place or _TEST_ONLY, message=message)]


def path_findings(places: Iterable[tuple[str, str, str, str]], command: Command) -> list[Problem]:
    """Look at folders and files where jobs are submitted.

    Args:
        places: The required access (`makes` or `writes` in it, `folder`, `file`), the path, its
        place in the file, and the way out.
        command: How commands are run there.
    """
    asked = list(places)
    if not asked:
        return []
    words = [f"{kind}:{path}" for kind, path, _, _ in asked]
    done = command(["sh", "-c", _PLACES, "sh", *words])
    answers = done.stdout.split("\n")[:-1]
    if done.returncode != 0 or len(answers) != len(asked):
        raise LauncherError(f"folders cannot be looked at: {done.stderr.strip()}")
    return [
        Problem(rule="site-path", place=place, message=f"{path}: {answer}; {way_out}")
        for (_, path, place, way_out), answer in zip(asked, answers, strict=True)
        if answer
    ]


def log_folder(pattern: str) -> str | None:
    """Return the folder of a log, as `--output` names it; None where the job decides.

    >>> log_folder("logs/%j.out"), log_folder("%x-%j.out"), log_folder("logs/%x/%j.out")
    ('logs', None, None)
    """
    folder = str(PurePosixPath(pattern).parent)
    return None if folder == "." or "%" in folder or pattern == "/dev/null" else folder
