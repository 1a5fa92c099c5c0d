"""`python -m tests.train.promise SEED COUNT`: draw, judge, and make failures as small as can be."""

from __future__ import annotations

import sys
from collections import Counter

from tests.train.promise.check import draw, judge, shown, smallest
from tests.train.promise.pool import Pool


def main(first: int, count: int) -> int:
    """Judge draws and print what fails; 1 if anything does."""
    pool, kept, failed = Pool(), Counter[str](), 0
    try:
        for seed in range(first, first + count):
            one = draw(seed)
            judged = judge(one, pool)
            kept[judged.kept or "BROKEN"] += 1
            if judged.broken:
                failed += 1
                print(f"--- make property SEED={seed} COUNT=1", flush=True)
                print(judged.broken, flush=True)
                print(shown(*smallest(one, pool)), flush=True)
            if (seed - first + 1) % 100 == 0:
                print(f"... {seed - first + 1} of {count}: {dict(kept)}", flush=True)
    finally:
        pool.close()
    print(f"SEED={first} COUNT={count}: {dict(sorted(kept.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
