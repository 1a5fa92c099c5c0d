"""The table of faults in docs/how-to/failures.md."""

from tests.system.chaos.fault_table import HEAD, PAGE, rows
from tests.system.chaos.faults import FAULTS


def test_the_table_of_faults_has_exactly_the_faults_that_can_be_drawn() -> None:
    page = PAGE.read_text()
    assert HEAD in page
    assert list(rows(page)) == [fault.what for fault in FAULTS]
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
