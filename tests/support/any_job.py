"""Any job that a job file may hold, as hypothesis makes them up."""

import string
from typing import Any

from hypothesis import strategies as st

from toolkit.job.types import RESERVED_NAMES
from toolkit.text.quantities import format_duration, format_size

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TRICKY = st.sampled_from(
    ["", "no", "1e-3", "0E0", "012", "~", "=", "<<", "null", "2001-01-01", "4:00", " a", "a ", "-"]
) | st.sampled_from(
    ["a\nb", "\u2028", "\x85", "\ufeff", "\x07", "é", "a: b", "# c", "'", '"', "{{", "%", "\t"]
)
TEXT = TEXTS | TRICKY
ENV_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: not RESERVED_NAMES.fullmatch(name)
)
SIZES = st.integers(1, 2**52).map(format_size)
DURATIONS = st.integers(1, 10**7).map(format_duration)
PATHS = TEXT.map(lambda text: f"/{text}")
SECRET_NAMES = st.from_regex(r"[a-z0-9]([-.a-z0-9]{0,9}[a-z0-9])?", fullmatch=True)
SECRETS = st.fixed_dictionaries(
    {"secret": SECRET_NAMES, "key": st.from_regex(r"[-._a-zA-Z0-9]{1,9}", fullmatch=True)}
) | st.fixed_dictionaries({"file": st.sampled_from(["/etc/key", "~/.secrets/it's a"])})
SBATCH = st.fixed_dictionaries(
    {},
    optional={
        "comment": st.text(string.printable[:95], min_size=1) | st.integers(1, 10**9) | st.none(),
        "exclusive": st.just(True) | st.none() | st.just("user"),
        "hold": st.just(True),
    },
)
NATURAL, POSITIVE = st.integers(0, 10**9), st.integers(1, 10**9)
PROGRAMS = TEXT.map(lambda text: f"./{text}")


def maybe(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings with any of these keys."""
    return st.fixed_dictionaries({}, optional=keys)


ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {"module": st.from_regex(r"[a-zA-Z_]\w{0,5}(\.[a-z_]\w{0,5})?", fullmatch=True)}
    ),
    st.fixed_dictionaries({"script": PROGRAMS}),
    st.fixed_dictionaries(
        {"command": st.tuples(PROGRAMS, st.lists(TEXT, max_size=2)).map(lambda c: [c[0], *c[1]])}
    ),
)
JOBS = st.builds(
    lambda entry, name, rest: {"name": name} | entry | rest,
    ENTRIES,
    st.from_regex(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True),
    maybe(
        args=st.lists(TEXT, max_size=4),
        image=st.from_regex(r"[a-z0-9/:.@]{1,12}", fullmatch=True),
        resources=maybe(
            nnodes=POSITIVE,
            nproc_per_node=POSITIVE,
            gpus_per_node=NATURAL,
            cpus_per_node=POSITIVE,
            memory=SIZES,
            shm=SIZES,
        ),
        time_limit=DURATIONS,
        env=st.dictionaries(ENV_NAMES.map(lambda name: f"A{name}"), TEXT, max_size=3),
        stop=maybe(grace=DURATIONS),
        retries=maybe(in_job=NATURAL, requeue=NATURAL),
        secrets=st.dictionaries(
            ENV_NAMES.map(lambda name: f"B{name}"), st.none() | SECRETS, max_size=3
        ),
        sbatch=SBATCH,
        mounts=st.lists(
            st.fixed_dictionaries(
                {
                    "source": PATHS | SECRET_NAMES.map(lambda name: f"claim:{name}"),
                    "target": PATHS,
                },
                optional={"read_only": st.booleans()},
            ),
            max_size=2,
        ),
    ),
)
