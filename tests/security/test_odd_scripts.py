"""Scripts that people cannot have meant are looked at in no more time than others."""

import pytest

from toolkit.lint.check import check_script

HEAD = "#!/bin/bash\n#SBATCH --time=1\nset -e\nsrun torchrun --nnodes=1 train.py &\n"


@pytest.mark.timeout(120)
def test_waiting_in_the_background_doubles_no_work() -> None:
    found = [problem.rule for problem in check_script(HEAD + "wait on &\n" * 40, "x.sbatch")]
    assert "srun-without-wait" in found
