"""The command line: generated from the configuration, and every mistake named at once."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.cli.config import SECTIONS, Config, field_docs, fields
from train.cli.flags import FILES, documented, parse, trains, usage
from train.errors import UsageError
from train.runtime.rank import RankInfo

ROOT = Path(__file__).parents[3]
ONE = RankInfo()


def problems(*argv: str, rank_info: RankInfo = ONE) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(argv, {"TRAIN_RUN_DIR": "/runs/x"}, rank_info)
    return str(caught.value).splitlines()


def accepted(*argv: str, rank_info: RankInfo = ONE) -> Config:
    return parse(argv, {"TRAIN_RUN_DIR": "/runs/x"}, rank_info).config


def ranks(count: int, **more: Any) -> RankInfo:
    here = {"local_world_size": count, "launched": True, "addressed": True}
    return RankInfo(world_size=count, **{**here, **more})


def test_flags_become_the_configuration() -> None:
    argv = ["--task", "chars", "--steps=7", "--global-batch", "96", "--micro-batch", "8"]
    argv += ["--lr", "1e-3", "--seed", "3", "--run-dir", "/runs/a b", "--export=w.st"]
    argv += ["--strategy", "fsdp", "--compile", "--cpu-offload", "--no-cpu-offload"]
    argv += ["--precision=bf16", "--dp-shard=4", "--dropout", "0"]
    assert accepted(*argv, rank_info=ranks(4)) == Config(
        task="chars",
        strategy="fsdp",
        steps=7,
        global_batch=96,
        micro_batch=8,
        lr=1e-3,
        seed=3,
        dropout=0.0,
        run_dir=Path("/runs/a b"),
        export=Path("w.st"),
        compile=True,
        precision="bf16",
        dp_shard=4,
    )


def test_run_directory_comes_from_the_environment_by_default() -> None:
    assert parse([], {"TRAIN_RUN_DIR": "/runs/x"}, ONE).config.directory == Path("/runs/x")
    with pytest.raises(UsageError, match=r"^no run directory: give --run-dir DIR or "):
        parse([], {}, ONE)
    for argv in (["--dry-run"], ["--write-config=x"]):
        assert parse(argv, {}, ONE).config.run_dir is None
        assert not trains(argv)


def test_every_field_has_a_flag_a_help_text_and_a_section() -> None:
    names = [field.name for field in dataclasses.fields(Config)]
    assert list(field_docs(Config)) == list(fields()) == names
    flags = [line.split()[0] for line in usage().splitlines() if line.startswith("  --")]
    assert flags == [f"--{name.replace('_', '-')}" for name in names] + [*FILES, "--help"]
    titles = [line for line in usage().splitlines() if line.endswith(":") and line[0] != " "]
    assert [title[:-1] for title in titles] == [
        *SECTIONS.values(),
        "The command line itself",
    ]
    assert all(len(line) <= 100 for line in usage().splitlines())
    # A choice that a text mentions nowhere could be found by guessing only.
    for field, text in documented():
        assert all(choice in text for choice in field.choices)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "8"], "unknown flag '--batch-size'; did you mean '--global-batch'?"),
        (["--epoch", "3"], "unknown flag '--epoch'; did you mean '--epochs'?"),
        (["--no-compil"], "unknown flag '--no-compil'; did you mean '--no-compile'?"),
        (["--frobnicate"], "unknown flag '--frobnicate'"),
        (
            ["--task=digit"],
            "--task: unknown task 'digit'; did you mean 'digits'?; known are digits, "
            "fashion-mnist, shuttle, chars, and FILE.py:CLASS for your own",
        ),
        (
            ["--task=nowhere.py:Mine"],
            f"--task: task 'nowhere.py:Mine': file {Path.cwd()}/nowhere.py does not exist",
        ),
        (
            ["--strategy=dpd"],
            "--strategy: unknown strategy 'dpd'; did you mean 'ddp'? (known: auto, single, "
            "dataparallel, ddp, fsdp, hsdp, manual, pp, tp, cp, hybrid, ps, local-sgd)",
        ),
        (
            ["--pp-schedule=1f1b"],
            "--pp-schedule: unknown pp schedule '1f1b' (known: GPipe, 1F1B, Interleaved1F1B, "
            "LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV)",
        ),
        (["--steps=many"], "--steps 'many' is not a whole number"),
        (["--checkpoint-every=soon"], "--checkpoint-every 'soon' is not a whole number or auto"),
        (["--checkpoint-every=-1"], "--checkpoint-every -1 is too small: at least 0"),
        (["--steps=0"], "--steps 0 is too small: at least 1"),
        (["--momentum=-1"], "--momentum -1.0 is too small: at least 0"),
        (["--lr=nan"], "--lr nan must be a positive, finite number"),
        (["--lr=0"], "--lr 0.0 must be a positive, finite number"),
        (["--weight-decay=inf"], "--weight-decay inf must be a positive, finite number"),
        (["--lr"], "--lr needs a value"),
        (["--export="], "--export needs a value"),
        (["--config="], "--config needs a value"),
        (["--compile=yes"], "--compile=yes: a switch takes no value; to turn it off, --no-compile"),
        (["3"], "unexpected argument '3': all flags have the form --flag value"),
        (
            ["--steps=3", "--epochs=2"],
            "--steps and --epochs both say when to end: give one of them",
        ),
        (["--dropout=1.5"], "--dropout 1.5 is a probability: from 0 to 1"),
        (
            ["--profile=13:10"],
            "--profile '13:10': steps count from 1 and go up, as in 10:13",
        ),
    ],
)
def test_a_mistake_is_named_with_the_way_out(argv: list[str], message: str) -> None:
    assert problems(*argv) == [message]


@pytest.mark.parametrize(
    ("one", "other"),
    [*itertools.combinations(["--dry-run", "--verify-only", "--evaluate-only", "--predict=x"], 2)],
)
def test_what_a_start_does_instead_of_training_is_one_thing(one: str, other: str) -> None:
    names = f"{one} and {other.removesuffix('=x')}"
    assert problems(one, other) == [f"{names} exclude each other: give one of them"]


def test_options_of_a_trained_model_are_refused_without_one() -> None:
    assert problems("--checkpoint=3") == [
        "--checkpoint 3 belongs to --evaluate-only or --predict, and would be ignored here: leave "
        "it out"
    ]
    assert problems("--predict=x", "--json") == [
        "--json belongs to --dry-run or --evaluate-only, and would be ignored here: leave it out"
    ]
    assert problems("--predict=") == ["--predict needs a value"]


def test_a_trained_model_is_used_with_the_flags_of_the_training_on_any_ranks() -> None:
    training = ("--steps=7", "--export=w.st", "--profile=2:3", "--global-batch=2")
    for use in (("--evaluate-only", "--json", "--checkpoint=4"), ("--predict=x",)):
        assert not trains(use)
        assert accepted(*use, *training, rank_info=ranks(3)).infers
        accepted(*use, *training, "--pp=3", rank_info=ranks(3))
        accepted(*use, *training, "--reduce=exact", rank_info=ranks(3))
    assert trains(training)


def test_all_mistakes_are_named_at_once() -> None:
    assert problems("--epoch=3", "--lr=fast", "--steps=0", "--no-such", "x") == [
        "unknown flag '--epoch'; did you mean '--epochs'?",
        "unknown flag '--no-such'",
        "--lr 'fast' is not a number",
        "--steps 0 is too small: at least 1",
    ]
    assert len(problems("--steps=3", "--epochs=2", "--dropout=2", "--init-method=x", "--tp=3")) == 4


def test_a_batch_may_be_uneven_but_not_leave_a_rank_without_samples() -> None:
    accepted("--global-batch=64", "--micro-batch=5", rank_info=ranks(3))
    assert problems("--global-batch=2", rank_info=ranks(3)) == [
        "--global-batch 2 cannot give each of 3 data shards a sample: use --global-batch 3 or "
        "more, or fewer ranks"
    ]
    # Ranks that share a slice need no samples of their own.
    accepted("--global-batch=2", "--tp=2", "--dp-shard=2", rank_info=ranks(4))
    assert problems("--strategy=ps", "--global-batch=2", rank_info=ranks(4)) == [
        "--global-batch 2 cannot give each of 3 trainers a sample: use --global-batch 3 or more, "
        "or fewer ranks"
    ]
    accepted("--strategy=ps", "--ps-mode=async", "--global-batch=2", rank_info=ranks(4))


def test_stages_want_batches_of_one_size() -> None:
    argv = ("--strategy=pp", "--dp-shard=2")
    accepted(*argv, rank_info=ranks(4))
    (message,) = problems(*argv, "--global-batch=65", rank_info=ranks(4))
    assert message.startswith("--global-batch 65 with --pp 2: stages expect batches of one size")


def test_a_strategy_that_does_not_fit_the_ranks_is_refused() -> None:
    (single,) = problems("--strategy=single", rank_info=ranks(2))
    assert single.startswith("--strategy single uses one process, but there are 2: ")
    (ddp,) = problems("--strategy=ddp")
    assert ddp.startswith("--strategy ddp needs a launcher that says which rank this is (RANK): ")
    (ps,) = problems("--strategy=ps")
    assert ps.startswith("--strategy ps needs a server and at least one trainer, but there is 1 ")
    (mesh,) = problems("--tp=2")
    assert mesh.startswith("the sizes of the mesh do not fit 1 rank: tp 2 = 2; ")


def test_strategy_follows_the_ranks_and_the_sizes() -> None:
    assert Config().strategy_on(ONE) == "single"
    assert Config().strategy_on(ranks(2)) == "ddp"
    assert Config(dp_replicate=2).strategy_on(ranks(2)) == "ddp"
    assert Config(tp=2).strategy_on(ranks(2)) == "hybrid"
    assert Config(strategy="fsdp").strategy_on(ranks(2)) == "fsdp"


@pytest.mark.parametrize(
    ("argv", "owner"),
    [
        ("--momentum 0.9", "--optimizer sgd"),
        ("--pp-schedule GPipe", "--pp"),
        ("--cp-method ulysses", "--cp"),
        ("--loss-parallel", "--tp"),
        ("--cpu-offload", "--strategy fsdp or --dp-shard"),
        ("--meta-init", "--strategy fsdp or --dp-shard"),
        ("--devices cpu,cpu", "--strategy manual or dataparallel"),
        ("--ps-mode async", "--strategy ps"),
        ("--staleness 2", "--ps-mode bounded"),
        ("--local-steps 4", "--strategy local-sgd"),
        ("--local-start 4", "--strategy local-sgd"),
        ("--virtual-shards 8", "--reduce exact"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused_with_its_owner(argv: str, owner: str) -> None:
    expected = f"{argv} belongs to {owner}, and would be ignored here: leave it out"
    assert problems("--strategy=ddp", *argv.split(), rank_info=ranks(2)) == [expected]


def test_a_flag_with_its_owner_is_taken() -> None:
    for argv in (
        "--optimizer sgd --momentum 0.9",
        "--pp 2 --pp-schedule GPipe --meta-init",
        "--cp 2 --cp-method ulysses --cpu-offload",
        "--tp 2 --loss-parallel --meta-init",
        "--strategy fsdp --cpu-offload --meta-init",
        "--strategy hsdp --cpu-offload",
        "--strategy ps --ps-mode bounded --staleness 2",
        "--strategy local-sgd --local-steps 4 --local-start 4",
        "--reduce exact --virtual-shards 8",
        "--comm-hook powersgd",
    ):
        accepted(*argv.split(), rank_info=ranks(2))
    # A flag without effect is accepted: a written file holds every field.
    accepted("--pp-schedule=1F1B", "--local-steps=8")
    # A run that shrinks to one rank is the same run.
    accepted("--comm-hook=fp16", rank_info=ranks(1))
    accepted("--strategy=manual", "--devices=cpu,cpu")
    (tp,) = problems("--strategy=tp", "--cpu-offload", rank_info=ranks(2))
    assert tp.startswith("--cpu-offload belongs to ")


def test_what_contradicts_each_other_is_refused() -> None:
    (hook,) = problems("--comm-hook=bf16", "--backend=gloo", rank_info=ranks(2))
    assert hook.startswith("--comm-hook bf16 needs --backend nccl, ")
    for strategy in ("local-sgd", "ps"):
        (fp16,) = problems(f"--strategy={strategy}", "--precision=fp16", rank_info=ranks(2))
        assert fp16 == (
            f"--strategy {strategy} cannot be combined with --precision fp16: ranks that step by "
            "themselves would scale their losses differently; use --precision bf16"
        )
    (norm,) = problems("--strategy=ps", "--sync-batch-norm", rank_info=ranks(2))
    assert norm.startswith("--strategy ps cannot be combined with --sync-batch-norm, ")
    (saves,) = problems("--strategy=ps", "--checkpoint-every=auto", rank_info=ranks(2))
    assert saves.startswith("--strategy ps cannot be combined with --checkpoint-every auto, ")
    (exact,) = problems("--reduce=exact", "--strategy=fsdp", rank_info=ranks(2))
    assert exact.startswith("--reduce exact keeps the whole model on each rank: ")
    (shards,) = problems("--reduce=exact", rank_info=ranks(3))
    assert "4 = 1 x 3 + 1; start 1, 2, 4 ranks" in shards
    accepted("--reduce=exact")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("tcp://host", "'tcp://host' must be tcp://HOST:PORT: "),
        ("tcp://host:0", "'tcp://host:0' must be tcp://HOST:PORT: "),
        ("tcp://host:70000", "'tcp://host:70000' must be tcp://HOST:PORT: "),
        ("file://here", "'file://here' must be file:///PATH: a full path"),
        ("file:///no/such/place", "file:///no/such/place: directory /no/such does not exist"),
        ("etcd://x", "'etcd://x' is unknown: use env://, tcp://HOST:PORT or "),
    ],
)
def test_a_place_to_meet_that_cannot_be_is_refused(method: str, message: str) -> None:
    (problem,) = problems("--init-method", method, rank_info=ranks(2))
    assert problem.startswith(f"--init-method {message}")


def test_only_the_environment_s_way_to_meet_needs_an_address() -> None:
    rank_info = ranks(2, addressed=False)
    (problem,) = problems(rank_info=rank_info)
    assert problem.startswith("RANK is set, but MASTER_ADDR and MASTER_PORT are not, ")
    for method in ("tcp://node-1:29500", "tcp://[::1]:29500", "file:///tmp/meeting"):
        accepted(f"--init-method={method}", rank_info=rank_info)


def test_processes_started_here_count_and_do_not_mix_with_a_launcher_s() -> None:
    accepted("--spawn=4", "--tp=2", "--dp-shard=2")
    (sizes,) = problems("--spawn=4", "--tp=3")
    assert sizes.startswith("the sizes of the mesh do not fit 4 ranks: tp 3 = 3; ")
    (both,) = problems("--spawn=2", rank_info=ranks(2))
    assert both.startswith("--spawn 2 starts processes by itself, but a launcher has started ")
    # Their own start is no launcher's.
    accepted("--spawn=2", rank_info=RankInfo().of_spawned(1, 2, "file:///x"))


def test_a_look_at_a_plan_needs_no_ranks() -> None:
    for only in ("--dry-run", "--write-config=x"):
        accepted("--dp-shard=64", "--tp=4", "--pp=2", "--global-batch=4096", only)
        accepted("--strategy=fsdp", only)
        (batch,) = problems("--dp-shard=64", "--global-batch=32", only)
        assert batch.startswith("--global-batch 32 cannot give each of 64 data shards ")


def test_epochs_are_rounded_up_to_whole_steps() -> None:
    assert Config(epochs=10, global_batch=64).total_steps(1437) == 225
    assert Config(steps=3).total_steps(1437) == 3
    assert Config().total_steps(64) == 10


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TRAIN_ATTEMPT": "two"}, "TRAIN_ATTEMPT='two' is not a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK: each process would take itself for rank"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1 must be below LOCAL_WORLD_SIZE=1",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^environment variable {message}"):
        RankInfo.from_environ(environ)


def test_ranks_may_be_numbered_by_hand() -> None:
    rank_info = RankInfo.from_environ({"RANK": "1", "WORLD_SIZE": "2"})
    assert (rank_info.rank, rank_info.world_size, rank_info.launched, rank_info.addressed) == (
        1,
        2,
        True,
        False,
    )


def test_every_command_that_a_page_shows_is_understood() -> None:
    pattern = re.compile(r"^(?:torchrun --nproc-per-node (\d+)|python) -m train(?: (.*))?$", re.M)
    shown = pattern.findall((ROOT / "docs/how-to/parallelism.md").read_text())
    assert len(shown) >= 6
    for count, flags in shown:
        # The file that the page has written just before.
        argv = flags.replace("--config chars.toml", "--task chars --dp-shard 8").split()
        assert accepted(*argv, rank_info=ranks(int(count)) if count else ONE).task in flags


def test_nothing_heavy_is_loaded_to_answer_a_command_line() -> None:
    code = (
        "import sys; from train.__main__ import main; sys.argv = ['train', *{}]; main(); "
        "heavy = {{'torch', 'numpy', 'tensorboardX', 'train.session'}}; "
        "print(sorted(heavy & set(sys.modules)) or 'light')"
    )
    for argv in (["--help"], ["--lr=x"], ["--write-config=/dev/null"]):
        done = subprocess.run(
            [sys.executable, "-c", code.format(argv)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout.endswith("light\n"), done.stderr
