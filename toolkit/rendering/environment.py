"""The Jinja environment of all templates, and the filters for every value."""

import contextlib
import functools
import json
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket

from toolkit.errors import RenderError
from toolkit.job.types import IN_RUN_DIR, ArgumentWord
from toolkit.text.control import CONTROL, printable, without_control
from toolkit.text.own_files import user_folder

YAML_WIDTH = 96
"""Maximum length of a mapping or list on one line of a manifest, in characters."""

# A reader must be able to see the content of a script before its submission.
_ANSI_C = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "'": r"\'", "\\": r"\\"}

_YAML_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./=-]*")
_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
_LINE = r"[!-~](?:[ -~]*[!-~])?"
_LINES = re.compile(rf"{_LINE}(?:\n+ *{_LINE})*\n")


def templates_folder() -> Path:
    """Find the templates inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def our_loader() -> jinja2.BaseLoader:
    """Return the loader of the toolkit's templates."""
    return jinja2.FileSystemLoader(templates_folder())


class _BytecodeCache(jinja2.FileSystemBytecodeCache):
    """Compiled templates in the user's cache folder: compiling them takes 0.06 s."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a compiled template, if there is room for it."""
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


def _bytecode_cache() -> jinja2.BytecodeCache | None:
    """Return the user's cache of compiled templates; None if others could write to it.

    The cached files are executed. jinja2 checks them against the template's text and the Python
    version.
    """
    folder = user_folder("CACHE") / f"jinja2-{jinja2.__version__}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o022
    return _BytecodeCache(str(folder)) if private and info.st_uid == os.getuid() else None


@functools.cache
def our_environment() -> jinja2.Environment:
    """Return the Jinja environment of the toolkit's templates."""
    loader, cache = our_loader(), _bytecode_cache()
    return configured(jinja2.Environment, loader=loader, auto_reload=False, bytecode_cache=cache)


def configured(environment_class: type[jinja2.Environment], **options: Any) -> jinja2.Environment:
    """Return a Jinja environment for scripts and manifests, with the filters for values."""
    environment = environment_class(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        **options,
    )
    environment.filters |= {
        "json": json_quote,
        "literal": kubernetes_literal,
        "sbatch": sbatch_quote,
        "sh": shell_quote,
        "sh_entry": entry_words,
        "sh_line": shell_line,
        "sh_path": path_quote,
        "yaml": yaml_block,
        "yaml_flow": yaml_flow,
        "torchrun": torchrun_literals,
        "sh_words": lambda values: " ".join(map(shell_quote, values)),
    }
    return environment


@functools.cache
def page_environment() -> jinja2.Environment:
    """Return the Jinja environment for HTML pages.

    Every value is escaped for HTML, and shown without control and invisible characters.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )


def template_text(name: str) -> str:
    """Return the text of a file in the templates folder, such as the script of a page."""
    environment = page_environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


# ---- Filters for bash, sbatch and Kubernetes

_VARIABLES = {"TRAIN_RUN_DIR": "_run_dir", "TRAIN_ATTEMPT": "_attempt"}
"""The scripts' variables, which are set before those of the ranks."""


def shell_quote(value: object) -> str:
    r"""Quote one word for bash, on one line for any content.

    >>> print(shell_quote("plain"), shell_quote("it's $HOME"), shell_quote("two\nlines"))
    plain 'it'"'"'s $HOME' $'two\nlines'

    A reference to the run in a word of `args` becomes a variable of the scripts:

    >>> print(shell_quote(ArgumentWord("--out=${TRAIN_RUN_DIR}/a b")))
    --out="$_run_dir"'/a b'
    """
    if isinstance(value, ArgumentWord):
        parts = [
            (shell_quote(text) if text else "") + (f'"${_VARIABLES[name]}"' if name else "")
            for text, name in value.pieces()
        ]
        return "".join(parts) or "''"
    text = str(value)
    if not _has_control(text):
        return shlex.quote(text)
    # sbatch refuses scripts with CR LF, and a line of a value must not look like script code.
    text = re.sub(r"[\n\r\t'\\]", lambda found: _ANSI_C[found[0]], text)
    return f"$'{without_control(text, _octal)}'"


def _has_control(text: str) -> bool:
    return CONTROL.search(text) is not None or "\t" in text or "\n" in text


def _octal(character: str) -> str:
    """Return a character as bash reads it in every locale: by its bytes."""
    try:
        content = character.encode(errors="surrogateescape")  # from a file name
    except UnicodeError:
        content = character.encode(errors="surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in content)


def sbatch_quote(value: object) -> str:
    """Quote the value of an `#SBATCH` option, which ends with its line.

    Raises:
        RenderError: the value contains a control character.
    """
    text = str(value)
    if _has_control(text):
        raise RenderError(f"{text!r} holds a control character, which no #SBATCH line can hold")
    # Unlike the shell, sbatch reads a backslash within single quotes as well.
    return shlex.quote(text.replace("\\", "\\\\"))


def path_quote(path: str) -> str:
    """Quote a path for bash; `~/` at its beginning stays the home folder.

    >>> path_quote("~/my keys/wandb"), path_quote("/etc/key")
    ("~/'my keys/wandb'", '/etc/key')
    """
    return "~/" + shell_quote(path[2:]) if path.startswith("~/") else shell_quote(path)


def entry_words(words: Iterable[str]) -> str:
    r"""Quote the entry of torchrun; the script resolves paths in the run directory at run time.

    >>> entry_words(["-m", "train"]), entry_words(["$TRAIN_RUN_DIR/my file.py", "--x"])
    ('-m train', '"$_run_dir"/\'my file.py\' --x')
    """
    first, *others = words
    quoted = shell_quote(first.removeprefix(IN_RUN_DIR))
    where = '"$_run_dir"/' if first.startswith(IN_RUN_DIR) else ""
    return " ".join([where + quoted, *map(shell_quote, others)])


def shell_line(value: str) -> str:
    """Return a line of bash from the user unchanged.

    Raises:
        RenderError: the value has more than one line.
    """
    if _has_control(value.replace("\t", " ")):
        raise RenderError(f"{value!r} holds a control character; write one line of bash per item")
    return value


def torchrun_literals(words: Sequence[str]) -> tuple[str, ...]:
    """Escape a program and arguments so that torchrun's expansion yields `words`.

    torchrun reads `$$` as `$` in all arguments, and replaces `${local_rank}` with a number
    (`torch.distributed.elastic.utils.macros`). The name of a command is not expanded.

    >>> torchrun_literals(["-m", "train", "$$", "$HOME", "${local_rank}"])
    ('-m', 'train', '$$$$', '$HOME', '${local_rank}')
    """
    unread = 2 if words and words[0] == "--no-python" else 0
    return (
        *words[:unread],
        *(
            word.doubled() if isinstance(word, ArgumentWord) else word.replace("$$", "$$$$")
            for word in words[unread:]
        ),
    )


def kubernetes_literal(value: str) -> str:
    """Escape a text so that Kubernetes' `$(NAME)` expansion yields `value`.

    The expansion reads `$$` as `$` and copies one byte after any other `$`, which breaks multi-byte
    characters (k8s.io/kubernetes, third_party/forked/golang/expansion). So if the expansion would
    change anything, every `$` is doubled.

    >>> kubernetes_literal("$HOME"), kubernetes_literal("$(date) $$ $x")
    ('$HOME', '$$(date) $$$$ $$x')

    A reference to the run in a word of `args` becomes a variable of the pod, or is left to the
    supervisor:

    >>> print(kubernetes_literal(ArgumentWord("$(x) $TRAIN_RUN_DIR/$TRAIN_ATTEMPT")))
    $$(x) $(TRAIN_RUN_DIR)/${TRAIN_ATTEMPT}
    """
    if isinstance(value, ArgumentWord):
        known = {None: "", "TRAIN_RUN_DIR": "$(TRAIN_RUN_DIR)", "TRAIN_ATTEMPT": "${TRAIN_ATTEMPT}"}
        return "".join(kubernetes_literal(text) + known[name] for text, name in value.pieces())
    changed = re.search(r"\$(?:[$(]|[^\x00-\x7f])", value)
    return value.replace("$", "$$") if changed else value


# ---- Filters for YAML that every parser reads as the same value: a word is plain if it is a string
# in both YAML 1.1 and YAML 1.2; everything else is JSON, a subset of YAML.


def json_quote(value: object) -> str:
    r"""Return the value as JSON that every YAML parser reads as the same value.

    >>> print(json_quote({"a": ["no", "caf\u00e9"]}))
    {"a": ["no", "café"]}
    """
    # JSON is YAML except for characters that YAML reads as a line break or forbids.
    text = without_control(json.dumps(value, ensure_ascii=False), _escape_of_yaml)
    return text.replace("\ufffe", r"\ufffe").replace("\uffff", r"\uffff")


def _escape_of_yaml(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def yaml_flow(value: object) -> str:
    """Return the value on one line.

    >>> print(yaml_flow({"name": "tmp", "x": ["--lr", "1e-3", "no", "a b", True, None]}))
    {name: tmp, x: [--lr, "1e-3", "no", "a b", true, null]}
    """
    if isinstance(value, str):
        plain = _YAML_PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS
        return value if plain else json_quote(value)
    if isinstance(value, Mapping):
        pairs = (f"{yaml_flow(key)}: {yaml_flow(entry)}" for key, entry in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(yaml_flow, value)) + "]"
    return json_quote(value)


def yaml_block(value: object, indent: int | None = None) -> str:
    r"""Return the text that follows `key:` or `-`, on the same line or indented below it.

    >>> print("key:" + yaml_block({"small": [1, 2]}, 2))
    key: {small: [1, 2]}
    >>> print("key:" + yaml_block({"long": "x" * 60, "text": "if a\nthen b\n"}, 2))
    key:
      long: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
      text: |
        if a
        then b

    Raises:
        RenderError: no indent is given for a value of several lines.
    """
    if indent is None:
        raise RenderError(
            "the filter 'yaml' needs the column of its block, such as yaml(4); for a value on one "
            "line, use 'yaml_flow'"
        )
    pad = " " * indent
    if isinstance(value, str):
        if not _LINES.fullmatch(value):
            return " " + yaml_flow(value)
        return " |" + "".join(f"\n{pad}{line}" if line else "\n" for line in value[:-1].split("\n"))
    if not isinstance(value, Mapping | Sequence) or not value:
        return " " + yaml_flow(value)
    text = yaml_flow(value)
    if len(text) <= YAML_WIDTH and not _holds_lines(value):
        return " " + text
    if isinstance(value, Mapping):
        lines = [f"{yaml_flow(key)}:{yaml_block(one, indent + 2)}" for key, one in value.items()]
    else:
        items = [yaml_block(item, indent + 2) for item in value]
        # A mapping or list of several lines starts on the line of its dash.
        lines = ["- " + text.lstrip("\n ") if text[0] == "\n" else "-" + text for text in items]
    return "".join(f"\n{pad}{line}" for line in lines)


def _holds_lines(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_lines, value.values()))
    if isinstance(value, str):
        return _LINES.fullmatch(value) is not None
    return isinstance(value, Sequence) and any(map(_holds_lines, value))
