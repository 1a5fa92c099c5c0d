"""docs/explanation/security.md names a test for each promise, and the tests exist."""

import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs/explanation/security.md").read_text()


def test_each_test_that_the_page_names_exists() -> None:
    files = set(re.findall(r"`(tests/[a-z_/]+\.py)`", PAGE))
    modules = set(re.findall(r"`(test_[a-z_]+)`", PAGE))
    assert len(files) >= 7 and len(modules) >= 10
    missing = [name for name in files if not (ROOT / name).is_file()]
    missing += [n for n in modules if not (ROOT / "tests/security" / f"{n}.py").is_file()]
    assert missing == []


def test_each_party_that_cannot_do_something_has_a_test() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")][2:]
    promises = {who.strip(): cannot for _, who, _, cannot, _ in rows if cannot.strip()}
    without = [who for who, cannot in promises.items() if "test_" not in cannot]
    # What an administrator of a cluster cannot do follows from all other rows.
    assert without == ["An administrator of the cluster"]
