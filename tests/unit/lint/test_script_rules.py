"""Rules for batch scripts: every planted fault once, with its line, and no false alarm."""

import subprocess
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import toolkit
from tests.conftest import ROOT
from tests.support.any_job import JOBS
from tests.unit.lint.test_bash import PIECES
from tests.unit.rendering.test_environment import HOSTILE, scripts
from toolkit.errors import InputError
from toolkit.lint.check import SCRIPT_RULES, check_script
from toolkit.lint.scripts.options import read_directives
from toolkit.lint.scripts.script import Site

SCRIPTS = ROOT / "tests/data/scripts"

EXPECTED = {
    "accelerate.slurm": [
        (11, "node-rank"),
        (13, "fixed-port"),
        (15, "kill-on-bad-exit"),
        (15, "srun-wait"),
        (16, "torchrun-without-srun"),
        (17, "torchrun-without-srun"),
    ],
    "background.job": [
        (8, "node-rank"),
        (10, "failure-masked"),
        (10, "wait-interrupted"),
    ],
    "careful.sbatch": [],
    "first-node-only.sbatch": [
        (5, "brace-stray"),
        (6, "failure-masked"),
        (6, "nodes-unused"),
    ],
    "forgetful.sh": [
        (1, "shebang-missing"),
        (3, "directive-unknown"),
        (4, "secret-literal"),
        (7, "failure-masked"),
        (7, "torchrun-without-srun"),
        (9, "failure-masked"),
        (9, "torchrun-without-srun"),
    ],
    "four-nodes.sbatch": [
        (6, "directive-variable"),
        (6, "time-missing"),
        (12, "head-address"),
        (17, "several-torchruns"),
        (17, "kill-on-bad-exit"),
        (18, "nnodes-mismatch"),
        (19, "nproc-mismatch"),
        (20, "rdzv-id"),
        (22, "fixed-port"),
    ],
    "headings.sbatch": [
        (9, "directive-unknown"),
        (10, "directive-unknown"),
        (13, "fixed-port"),
    ],
    "in-containers.sbatch": [
        (6, "container-on-sbatch"),
        (10, "failure-masked"),
        (12, "slurm-in-container"),
        (15, "fixed-port"),
        (19, "failure-masked"),
        (19, "slurm-in-container"),
    ],
    "in-the-foreground.sbatch": [
        (3, "directive-unknown"),
        (7, "failure-masked"),
        (7, "trap-blocked"),
        (8, "export-none"),
        (8, "failure-masked"),
    ],
    "launcher-string.slurm": [
        (5, "export-comma"),
        (11, "nproc-mismatch"),
        (12, "head-pipe"),
        (13, "fixed-port"),
        (15, "localhost-master"),
        (17, "secret-literal"),
        (22, "node-rank"),
        (28, "kill-on-bad-exit"),
        (28, "srun-wait"),
    ],
    "not-waited-for.sbatch": [
        (4, "failure-masked"),
        (4, "torchrun-without-srun"),
        (5, "fixed-port"),
        (5, "head-address"),
        (6, "srun-without-wait"),
    ],
    "old-slurm.sbatch": [(4, "gpus-per-task-typed"), (9, "srun-cpus")],
    "one-node.sbatch": [],
    "orphans.sbatch": [
        (2, "several-torchruns"),
        (4, "signal-orphans"),
        (7, "directive-late"),
        (15, "localhost-master"),
        (17, "export-none"),
        (17, "failure-masked"),
    ],
    "ranks-by-hand.sbatch": [
        (3, "ntasks-exceed-gpus"),
        (8, "nodes-in-one-element"),
        (9, "head-address"),
        (10, "port-random"),
        (11, "world-size-mismatch"),
        (12, "rank-in-batch-script"),
        (13, "secret-literal"),
        (16, "secret-printed"),
        (17, "kill-on-bad-exit"),
        (18, "wait-for-seconds"),
    ],
    "servers.sbatch": [],
    "static.sbatch": [],
    "submits.sh": [
        (7, "directive-unknown"),
        (8, "fixed-port"),
        (13, "time-missing"),
        (15, "failure-masked"),
    ],
    "template.sbatch": [(2, "script-template")],
    "warned.sbatch": [
        (5, "signal-unhandled"),
        (6, "log-truncated"),
        (7, "directive-unknown"),
        (12, "srun-sigterm"),
        (18, "rdzv-id"),
        (21, "srun-overlap"),
        (22, "wait-interrupted"),
    ],
}
"""Script: the lines of its faults, and the rule of each."""


SITES = {"old-slurm.sbatch": Site(slurm=(22, 5))}
"""What is known of the site of a script."""


def found(text: str, site: Site | None = None) -> list[tuple[int, str | None]]:
    problems = check_script(text, "x", site)
    return [(int((p.place or "").removeprefix("x:")), p.rule) for p in problems]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_planted_fault_is_found_once_with_its_line(name: str) -> None:
    problems = found((SCRIPTS / name).read_text(), SITES.get(name))
    assert sorted(problems) == sorted(EXPECTED[name])


def test_every_script_has_its_expectation_and_is_bash() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in SCRIPTS.iterdir())
    for path in SCRIPTS.iterdir():
        subprocess.run(["bash", "-n", path], check=True)


def test_what_is_said_has_the_place_the_rule_and_the_way_out() -> None:
    (first, *_) = check_script((SCRIPTS / "orphans.sbatch").read_text(), "o.sbatch")
    assert str(first) == (
        "o.sbatch:2: --ntasks-per-node=4 starts 4 torchruns on each node; write "
        "--ntasks-per-node=1; torchrun starts the workers (--nproc-per-node)"
    )


# ---- No false alarm


@pytest.mark.parametrize("name", sorted(n for n in scripts() if not n.endswith("here")))
def test_no_rule_speaks_on_a_script_that_we_render(name: str) -> None:
    assert found(scripts()[name]) == []


PROFILES = st.builds(
    lambda runtime, rest: toolkit.SlurmProfile.model_validate(
        {"name": "s", "runtime": runtime, **rest}
    ),
    st.sampled_from(["bare", "pyxis", "apptainer", "podman"]),
    st.fixed_dictionaries(
        {},
        optional={
            "exclusive": st.just(True),
            "gpus_flag": st.sampled_from(["gres", "gpus-per-task"]),
            "modules": st.just(("cuda", "python")),
            "prolog": st.just(("unset X", "export MASTER=head # localhost")),
            "epilog": st.just(("rm -f /tmp/x",)),
        },
    ),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=JOBS, profile=PROFILES, hostile=st.sampled_from(HOSTILE))
def test_no_rule_speaks_whatever_job_we_render(
    data: dict[str, Any], profile: toolkit.SlurmProfile, hostile: str
) -> None:
    more = {"image": "r.io/t:1", "args": (*data.get("args", ()), hostile), "env": {"V": hostile}}
    data = {"time_limit": "2d", **data, **more, "mounts": ()}
    try:
        script = toolkit.render(toolkit.plan(toolkit.JobSpec.model_validate(data), profile))
    except (InputError, ValueError):  # a job that cannot be, or not there
        assume(False)
    assert found(script) == []


# ---- One rule after another, where the fixtures leave a case open

HEAD = "#!/bin/bash\n#SBATCH --time=1:00:00\n"
TWO = f"{HEAD}#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nset -e\n"
RUN = "srun --kill-on-bad-exit torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
WHERE = "--rdzv-endpoint=$head:$((61000 + SLURM_JOB_ID % 4000))"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Directives
        ("#!/bin/bash\n#SBATCH -t 5 -N2 -p a,b --gres=gpu:2 --comment='# no, x' # yes\n", []),
        (f"{HEAD}#SBATCH --nodes = 2\n", [(3, "directive-unknown")]),
        (f"{HEAD}#SBATCH --nodes\n", [(3, "directive-unknown")]),
        (f"{HEAD}#SBATCH --ntasks-per-n=2 --mem-per-c 2G --exclusive --no-requeue\n", []),
        (f"{HEAD}#SBATCH --constraint=[a|b]&c --mail-type=END,FAIL\n", []),
        (f"{HEAD}#SBATCH --output=`date`.log\n", [(3, "directive-variable")]),
        (f"{HEAD}echo\ncat <<E\n#SBATCH --nodes=2\nE\n", []),
        ("#!/bin/bash\r\n#SBATCH --time=1\r\necho\r\n", [(1, "dos-line-breaks")]),
        ("#!/usr/bin/env python3\n#SBATCH --time=1\nprint('it')\n", []),
        ("#!/usr/bin/env python3\nprint('it')\n#SBATCH --time=1\n", [
            (1, "time-missing"), (3, "directive-late")
        ]),
        # What reaches the tasks
        (f"{HEAD}#SBATCH -c 4\nsrun -c4 python x\n", []),
        (f"{HEAD}#SBATCH -c 4\nsrun hostname\n", []),
        (f"{HEAD}#SBATCH -c 4\nsrun hostname\nsrun python x\n", []),
        (f"{HEAD}#SBATCH -c 4\nSRUN_CPUS_PER_TASK=4 srun python x\n", []),
        (f"{HEAD}#SBATCH --export=NONE\nexport SLURM_EXPORT_ENV=ALL\nsrun python x\n", []),
        (f"{HEAD}#SBATCH --export=NONE\nsrun --export=ALL python x\n", []),
        (f"{HEAD}srun --export=ALL,A=1,B=2,HOME python x\n", []),
        (f"{HEAD}srun --export=ALL,A=1,b python x\n", [(3, "export-comma")]),
        (f"{HEAD}d=0,1\nsrun --export=ALL,A=$d python x\n", [(4, "export-comma")]),
        (f"{HEAD}srun --export=\"ALL,'A=1,b',HOME\" python x\n", []),
        (f"{HEAD}srun --export=ALL,'A=1,b' python x\n", [(3, "export-comma")]),
        (f"{HEAD}#SBATCH --export=\"ALL,'A=1,b'\"\npython x\n", []),
        # Meeting
        (f"{TWO}{RUN} {WHERE} x.py\n", []),
        (f"{TWO}export MASTER_PORT=29500\n", [(6, "fixed-port")]),
        (f"{TWO}p=29400\n{RUN} --rdzv-endpoint=$head:$p x.py\n", [(6, "fixed-port")]),
        (f"{TWO}p=${{PORT:-29400}}\n{RUN} --rdzv-endpoint=$head:$p x.py\n", [(6, "fixed-port")]),
        (f"{TWO}p=$((RANDOM + 20000))\n{RUN} --rdzv-endpoint $head:$p x.py\n", []),
        (f"{TWO}{RUN} --rdzv-endpoint=$head x.py\n", [(6, "fixed-port")]),
        (f"{TWO}{RUN} x.py\n", [(6, "localhost-master")]),
        (f"{TWO}[ -n \"$head\" ] || head=localhost\n{RUN} {WHERE} x.py\n", [
            (6, "localhost-master")
        ]),
        (f"{TWO}srun -N1 -n1 torchrun --standalone x.py\n", []),
        (f"{TWO}srun -K torchrun --standalone x.py\n", [(6, "localhost-master")]),
        (f"{TWO}export PET_RDZV_ENDPOINT=$head:$((SLURM_JOB_ID % 9 + 61000))\n{RUN} x.py\n", []),
        (f"{TWO}echo $(hostname -I)\nhostname -I\n", []),
        (f"{TWO}head=$(hostname -I | cut -d' ' -f1)\n", [(6, "head-address")]),
        (f"{TWO}srun bash -c 'export A=$(hostname -I)'\n", []),
        (f"{HEAD}#SBATCH -N 1-4\nsrun -K --ntasks-per-node=1 torchrun --standalone x.py\n", [
            (4, "localhost-master")
        ]),
        (f"{TWO}set -o pipefail\nh=$(scontrol show hostnames | sed -n 1p)\n", []),
        (f"{TWO}set -o pipefail\nh=$(scontrol show hostnames | sed 1q)\n", [(7, "head-pipe")]),
        (f"{TWO}h=$(scontrol show hostnames | head -1)\n", []),
        (f"{TWO}srun -K torchrun --nnodes=2 --rdzv-backend=c10d {WHERE} x\n", [(6, "rdzv-id")]),
        (f"{TWO}{RUN.replace('=2', '=1:3')} {WHERE} x.py\n", []),
        (f"{TWO}{RUN.replace('=2', '=3')} {WHERE} x.py\n", [(6, "nnodes-mismatch")]),
        (f"{TWO}{RUN} {WHERE} x.py --rdzv-id=1 --standalone --nnodes=9\n", []),
        # Steps
        (f"{HEAD}#SBATCH -N2 -n2\nset -e\n{RUN} {WHERE} x.py\n", []),
        (f"{HEAD}#SBATCH -N2\nset -e\n{RUN} {WHERE} x.py\n", []),
        (f"{HEAD}#SBATCH -N2 -c4\nset -e\n{RUN} {WHERE} x.py\n", [(5, "several-torchruns")]),
        (f"{HEAD}#SBATCH -N2 -n8\nset -e\n{RUN} {WHERE} x.py\n", [(3, "several-torchruns")]),
        (f"{HEAD}#SBATCH -N2 -c4 --tasks-per-node 1\nset -e\n{RUN} {WHERE} x.py\n", []),
        (f"{HEAD}#SBATCH -N2\nset -e\n{RUN.replace('srun', 'srun -n$SLURM_NNODES')} {WHERE} x", []),
        (f"{TWO}export SLURM_WAIT=30\n{RUN} {WHERE} x.py\n", [(6, "srun-wait")]),
        (f"{TWO}{RUN.replace('srun', 'srun -W0')} {WHERE} x.py\n", []),
        (f"{TWO}{RUN.replace('srun', 'srun --wait 299')} {WHERE} x.py\n", [(6, "srun-wait")]),
        (f"{TWO}srun -N1 -n1 python a & a=$!\nsrun -N1 -n1 python b & b=$!\nwait $a; wait $b", []),
        (f"{TWO}srun -n2 python a & a=$!\nwait $a\nsrun -n2 python b\n", []),
        (f"{TWO}ssh node2 torchrun --nnodes=2 {WHERE} --node-rank=1 x.py\n", []),
        (f"{TWO}command -v torchrun; echo srun torchrun; which torchrun\n", []),
        # Signals
        (f"{TWO}#SBATCH --signal=USR1@60\n", [(6, "directive-late")]),
        (f"{HEAD}#SBATCH --signal=USR1@60\ntrap 'touch x' USR1\npython x & wait $!\n", [
            (4, "signal-unhandled")
        ]),
        (f"{HEAD}#SBATCH --signal=USR1@60\nexport PET_SIGNALS_TO_HANDLE=SIGUSR1\n"
         "srun -n1 torchrun --standalone x.py\n", []),
        (f"{HEAD}#SBATCH --signal=B:10@60\ntrap 'kill -s USR1 $p; wait' 10\n"
         "srun python x & p=$!\nwait $p\n", []),
        (f"{TWO}trap 'kill $(jobs -p)' INT\n{RUN} {WHERE} x.py & p=$!\nwait $p; wait $p\n", [
            (6, "srun-sigterm")
        ]),
        (f"{TWO}mon & m=$!\n{RUN} {WHERE} x.py & p=$!\nwait $p\nkill $m\n", []),
        # How it ends
        (f"{HEAD}srun python x && echo yes\n", []),
        (f"{HEAD}srun python x && echo yes\necho end\n", [(3, "failure-masked")]),
        (f"{HEAD}if ! srun python x; then exit 3; fi\necho end\n", []),
        (f"{HEAD}srun python x\n[ $? = 0 ] || exit 1\necho end\n", []),
        (f"{HEAD}srun python x; s=$?\necho end\nexit $s\n", []),
        (f"{HEAD}srun python x\nexit\n", []),
        (f"{HEAD}srun python x || fail 'no'\necho\n", []),
        (f"{HEAD}for i in 1 2; do srun python x; done\n", []),
        (f"{HEAD}for i in 1 2; do srun python x; done\necho\n", [(3, "failure-masked")]),
        (f"{HEAD}set -e\nfor i in 1 2; do srun python x; done\necho\n", []),
        (f"{HEAD}srun python x | tee log\nexit ${{PIPESTATUS[0]}}\n", []),
        (f"{HEAD}srun python x | tee log\n", [(3, "failure-masked")]),
        (f"{HEAD}srun python x & p=$!\nwait $p || s=$?\n((s == 0)) || exit 1\n", []),
        (f"{HEAD}exec srun python x\n", []),
        (f"{HEAD}set -e\nrun() {{\nsrun python x\n}}\nrun a & run b &\nwait\n", [
            (8, "failure-masked")
        ]),
        (f"{HEAD}set -e\nrun() {{\nsrun python x\n}}\nrun a & a=$!\nwait $a\n", []),
        (f"{TWO}deepspeed train.py\n", [(6, "torchrun-without-srun")]),
        (f"{TWO}deepspeed --hostfile=hosts train.py\n", []),
        # Secrets
        (f"{HEAD}export HF_TOKEN=$(cat ~/t) API_KEY=$KEY\n", []),
        (f"{HEAD}srun python x --api-key abcdef1234567890\n", [(3, "secret-literal")]),
        (f"{HEAD}srun --export=ALL,DB_PASSWORD=hunter2 python x\n", [(3, "secret-literal")]),
    ],
)  # fmt: skip
def test_each_rule_knows_where_it_holds(text: str, expected: list[tuple[int, str]]) -> None:
    assert sorted(found(text)) == sorted(expected)


def test_every_rule_is_tried() -> None:
    tried = {rule for expected in EXPECTED.values() for _, rule in expected}
    assert {rule.id for rule in SCRIPT_RULES} - tried == {"dos-line-breaks"}, "see above"


def test_the_same_port_is_told_once_and_not_of_whole_nodes() -> None:
    text = f"export MASTER_PORT=29500\n{RUN} --rdzv-endpoint=$head:29500 x.py\n"
    assert found(TWO + text) == [(6, "fixed-port")]
    whole = TWO.replace("set -e", "#SBATCH --exclusive\nset -e")
    assert found(whole + text) == []
    gpu = f"{HEAD}#SBATCH --gpus-per-node=1\ntorchrun --nproc-per-node=1 x.py\n"
    assert found(gpu) == [(4, "fixed-port")]
    assert found(gpu.replace("=1", "=8")) == []


def test_an_option_in_an_unknown_variable_is_not_missed() -> None:
    for step in ("srun $OPTIONS torchrun", 'srun "${OPTIONS[@]}" torchrun'):
        assert found(f"{TWO}{step} $TORCH x.py\n") == []
    several = f"{HEAD}#SBATCH -N2 -c4\nset -e\n"
    assert found(f"{several}srun -K $OPTIONS --ntasks-per-node=4 torchrun $TORCH x.py\n") == [
        (5, "several-torchruns")
    ]


def test_ranks_in_a_container_are_ranks() -> None:
    ranks = TWO.replace("=1\n", "=8\n") + "export MASTER_ADDR=$head\n"
    step = "srun apptainer exec img.sif bash -c 'RANK=$SLURM_PROCID python x.py'\n"
    assert found(ranks + step) == [(7, "kill-on-bad-exit")]
    assert found(ranks.replace("=8", "=1").replace("=2", "=1") + step) == []
    assert found(TWO.replace("=1\n", "=8\n") + step) == []  # they may be tasks of an array


def test_srun_inherits_cpus_again_since_slurm_23_11() -> None:
    text = f"{HEAD}#SBATCH -N2 -c4\nset -e\n{RUN} {WHERE} x.py\n"
    for version, rule in {
        (22, 5): "srun-cpus",
        (23, 2): "srun-cpus",
        (23, 11): "several-torchruns",
        (24, 11): "several-torchruns",
    }.items():
        assert found(text, Site(slurm=version)) == [(5, rule)]


def test_a_message_says_what_hides_the_value() -> None:
    step = RUN.replace("$SLURM_JOB_ID", "'$SLURM_JOB_ID'")
    (problem,) = check_script(f"{TWO}{step} {WHERE} x.py\n", "x")
    assert "single quotes prevent the expansion of $SLURM_JOB_ID" in problem.message
    (problem,) = check_script(f"{TWO}{RUN} x.py {WHERE}\n", "x")
    assert "--rdzv-endpoint is after the script" in problem.message


def test_a_directive_of_a_hyphen_alone_is_read_to_its_end() -> None:
    (directive,) = read_directives("#SBATCH - -N2 -\n")
    assert directive.stray == ("-", "-")
    assert [option.name for option in directive.options] == ["nodes"]


def test_a_comment_takes_a_finding_back() -> None:
    text = f"{HEAD}export MASTER_PORT=29500"
    assert found(text) == [(3, "fixed-port")]
    assert found(f"{text}  # toolkit: allow fixed-port: nobody else is here\n") == []
    above = "# toolkit: allow time-missing, fixed-port\nexport MASTER_PORT=29500\n"
    assert found(HEAD + above) == []
    assert found(f"{text}  # toolkit: allow head-pipe\n") == [(3, "fixed-port")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "x: the file is empty"),
        (f"{HEAD}echo 'a\n", "x:3: this single quote is never closed"),
        (f"{HEAD}srun bash -c 'echo\n if true'\n", "x:4: 'then' is missing for what begins here"),
    ],
)
def test_bash_that_cannot_be_read_is_told_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_script(text, "x")
    assert str(caught.value) == message


WORDS = st.sampled_from(
    [
        *(
            "srun ",
            "torchrun ",
            "--rdzv-endpoint=",
            "$x",
            "localhost:1 ",
            "bash -c ",
            "kill ",
            "$!",
        ),
        *("trap ", "USR1 ", "wait ", "x=", "export ", "scontrol show ", "--export=A=1,b ", "-N"),
    ]
)


@settings(max_examples=200)
@given(st.lists(PIECES | WORDS, max_size=20).map("".join))
def test_no_script_is_more_than_findings_or_a_message(text: str) -> None:
    try:
        check_script(f"{HEAD}#SBATCH --nodes=2\n{text}", "x")
    except InputError as error:
        assert str(error).startswith("x:")


@pytest.mark.parametrize(("end", "found"), [("fi", True), ("else exit 1; fi", False)])
def test_a_test_for_one_status_masks_all_others(end: str, found: bool) -> None:
    text = (
        "#!/bin/bash\n#SBATCH --time=1:00:00\ntimeout 50m torchrun --standalone t.py\n"
        f'if [[ $? -eq 124 ]]; then sbatch "$0"; {end}\n'
    )
    assert ("failure-masked" in {one.rule for one in check_script(text, "x.sbatch")}) == found
