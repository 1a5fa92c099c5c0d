"""What to train and how: one frozen object, and the description of its fields.

Flags, help, configuration file and reference page are made from each field's type and docstring.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from ..parallel.layout import Layout, resolve
from ..runtime.rank import RankInfo
from ..tasks import problem_of


@dataclass(frozen=True)
class AtLeast:
    """The smallest value that a number may have."""

    least: float


EXACT = ("virtual_shards", "micro_batch", "precision", "tf32")
"""Fields that make it another run when they change, with `--reduce exact` only."""

Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]

StrategyName = Literal[
    "auto", "single", "dataparallel", "ddp", "fsdp", "hsdp", "manual", "pp", "tp", "cp", "hybrid",
    "ps", "local-sgd",
]  # fmt: skip
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
]  # fmt: skip


SECTIONS = {
    "task": "What to learn",
    "optimizer": "Steps",
    "strategy": "Sharing the work",
    "precision": "Arithmetic",
    "run_dir": "What is written",
    "evaluate_only": "Using a trained model",
    "device": "Starting and watching",
}
"""Section titles of the help, by the first field of each section."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the command line sets."""

    task: str = "digits"
    """What to learn: `digits`, `fashion-mnist`, `shuttle`, `chars`, or your own `FILE.py:CLASS`."""
    steps: Count | None = None
    """Train until this many optimizer steps have been made in all."""
    epochs: Count | None = None
    """Train for this many passes over the training data (default: 10, unless --steps is given)."""
    global_batch: Count = 64
    """Samples per optimizer step over all ranks together."""
    micro_batch: Count | None = None
    """Samples per forward pass of a rank; smaller needs less memory (default: a rank's share; with
    pp or --reduce exact, a part of it)."""
    eval_batch: Count | None = None
    """Samples per forward pass of a rank in evaluations (default: as many as in training), and with
    predict (default: --micro-batch, or 64)."""
    seed: Natural = 0
    """Fixes initial weights, order of the data and random numbers of the training."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """`balanced` draws rare classes as often as frequent ones, with replacement."""
    workers: Natural = 0
    """Processes per rank that read ahead, for tasks with a torch Dataset."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: float = 0.005
    """Learning rate, at its highest."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Keep the learning rate, or let it fall towards 0 until the last step."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to --lr."""
    momentum: Annotated[float, AtLeast(0)] = 0.0
    """Momentum of sgd."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.01
    """Decoupled weight decay of adamw; of sgd, the gradient of half the squared weights."""
    clip_norm: float | None = None
    """Scale gradients down to this norm over all parameters."""
    dropout: Annotated[float, AtLeast(0)] | None = None
    """Probability for every dropout layer of torch in the model (default: as the task made
    them)."""

    strategy: StrategyName = "auto"
    """How to use several processes; `auto`: by the sizes below, else ddp when there are several."""
    dp_replicate: Count | None = None
    """Ranks with copies of the model."""
    dp_shard: Count | None = None
    """Ranks that share the parameters of one copy (FSDP)."""
    tp: Count | None = None
    """Ranks that share each layer's matrices (tensor parallel, by the task's `tensor_plan()`)."""
    pp: Count | None = None
    """Ranks that hold successive stages of the model (pipeline parallel)."""
    cp: Count | None = None
    """Ranks that share each sequence (context parallel)."""
    pp_schedule: ScheduleName = "1F1B"
    """In which order stages work on micro-batches."""
    cp_method: Literal["allgather", "ulysses"] = "allgather"
    """Exchange keys and values, or swap sequence parts for heads with all-to-all."""
    loss_parallel: bool = False
    """With tp: keep each rank's share of the classes to itself up to the loss."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """With ddp: compress gradients on the wire."""
    gradient_sync: Literal["auto", "last", "each"] = "auto"
    """With fsdp: reduce gradients after the last micro-batch or each; `auto`: as memory allows."""
    cpu_offload: bool = False
    """With fsdp: keep parameters and optimizer state in the host's memory."""
    meta_init: bool = False
    """With fsdp: never hold the whole model on more than one rank, not even at the start."""
    devices: str | None = None
    """With manual and dataparallel: the devices, such as `cuda:0,cuda:1` or `cpu,cpu`."""
    ps_mode: Literal["sync", "async", "bounded"] = "sync"
    """With ps: wait for all trainers, for none, or for those too far behind."""
    staleness: Natural = 4
    """With ps-mode bounded: how many updates old the weights of a gradient may be."""
    local_steps: Count = 8
    """With local-sgd: steps between two averagings."""
    local_start: Natural = 0
    """With local-sgd: average after each of the first so many steps (post-local SGD)."""
    reduce: Literal["fast", "exact"] = "fast"
    """`exact`: the same bits on any number of ranks that divides --virtual-shards."""
    virtual_shards: Count = 4
    """With --reduce exact: slices of the batch, with gradients summed in fixed order."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers that matrices are multiplied in; fp16 scales the loss."""
    tf32: Literal["auto", "on", "off"] = "auto"
    """Have GPUs round fp32 factors to 10 bits of mantissa; `auto`, as torch: only in cuDNN
    (convolutions, RNNs)."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the model with torch.compile."""
    sync_batch_norm: bool = False
    """Normalise over the batch of all ranks instead of each rank's own."""

    run_dir: Path | None = None
    """Directory of checkpoints, events and outcome (default: $TRAIN_RUN_DIR)."""
    adopt: str | None = None
    """The --task that the run in --run-dir names, if it is the same one at another path; with
    evaluate-only and predict, one with the same model."""
    checkpoint_every: Natural | Literal["auto"] = 100
    """Write a checkpoint each so many steps; 0: only when stopped and at the end; `auto`: as often
    as loses the least time, by the cost of a checkpoint and the failures of the run."""
    keep_checkpoints: Count = 2
    """How many whole checkpoints to keep, over all attempts."""
    on_checkpoint_error: Literal["stop", "continue"] = "stop"
    """What to do when one cannot be written; the ones before it stay. The last one must be."""
    export: Path | None = None
    """Write the final weights to this file, as plain safetensors."""
    tensorboard: Literal["auto", "off"] = "auto"
    """Event files in the run directory, for `tensorboard --logdir`; `auto`: with tensorboardX."""

    evaluate_only: bool = False
    """Evaluate a checkpoint of the run directory, print the metrics, and train nothing."""
    predict: Path | None = None
    """Write a prediction for each test sample to this file, as JSON Lines, and train nothing."""
    checkpoint: Natural | None = None
    """With evaluate-only and predict: the step of the checkpoint (default: the newest)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto`: on GPUs where this process sees some, one for each rank."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """Backend of the collectives; `auto`: nccl on GPUs, gloo on CPUs."""
    init_method: str = "env://"
    """Where ranks meet: `env://` (torchrun), `tcp://HOST:PORT` or `file:///NEW-FILE`."""
    spawn: Count | None = None
    """Start so many processes on this machine by itself, without torchrun."""
    timeout_s: Count = 600
    """Seconds a rank waits for the others before it gives up; must outlast a checkpoint."""
    profile: str | None = None
    """Trace these steps, such as `10:13`, and print where the time goes."""
    verify: bool | None = None
    """Prove before the first step that one process would train the same, or refuse; --no-verify: do
    not (default: at a start that is the first or trains in another way, where it takes less than a
    minute and half of the memory)."""
    accept: str | None = None
    """Accepted differences from one process, such as `batch-norm,loss-mixes-samples`."""
    verify_only: bool = False
    """Make the proof of --verify, and train nothing."""
    dry_run: bool = False
    """Show the plan, memory and traffic for any number of ranks, and train nothing."""
    device_memory: str | None = None
    """With dry-run: what a rank's device has, such as `80GiB`; exit with 2 if it is too little."""
    nproc_per_node: Count = 8
    """With dry-run: how many ranks there are on a node."""
    json: bool = False
    """With dry-run and evaluate-only: print JSON, for programs."""

    @property
    def directory(self) -> Path:
        """The run directory, which a parsed configuration always has."""
        assert self.run_dir is not None, "parse() refuses a command line without a run directory"
        return self.run_dir

    @property
    def accepted(self) -> frozenset[str]:
        """The names of `--accept`."""
        return frozenset(self.accept.split(",")) if self.accept else frozenset()

    @property
    def infers(self) -> bool:
        """Whether a trained model is used, and nothing is trained."""
        return self.evaluate_only or self.predict is not None

    def identity(self) -> dict[str, object]:
        """Return the fields that make it another run when they change.

        `steps` and `epochs` are not among them, so that a finished run can be extended, unless the
        learning rate falls towards the end; nor are fields that change with the number of ranks.
        """
        names = ["task", "global_batch", "lr", "seed", "sampling", "optimizer", "momentum"]
        names += ["weight_decay", "clip_norm", "dropout", "lr_schedule", "warmup_steps"]
        if self.lr_schedule != "constant":
            names += ["steps", "epochs"]
        if self.reduce == "exact":
            # Equal bits are promised only for the same slices and the same numeric formats.
            names += EXACT
        return {name: getattr(self, name) for name in names}

    def total_steps(self, train_samples: int) -> int:
        """Return how many steps the run has in all.

        The last step of the last epoch takes a full batch too, so a few samples of the next epoch
        may be seen; an extended run is then the same as a run that was longer from the start.
        """
        if self.steps is not None:
            return self.steps
        return math.ceil((self.epochs or 10) * train_samples / self.global_batch)

    def axis_sizes(self) -> dict[str, int | None]:
        """Return the sizes of the mesh that were given."""
        return {axis: getattr(self, axis) for axis in Layout().sizes()}

    def strategy_on(self, rank_info: RankInfo) -> str:
        """Return the strategy's name with `auto` resolved."""
        if self.strategy != "auto":
            return self.strategy
        axes = {axis for axis, size in self.axis_sizes().items() if size not in (None, 1)}
        if axes <= {"dp_replicate"}:
            return "ddp" if rank_info.world_size > 1 else "single"
        return "hybrid"

    def layout_on(self, rank_info: RankInfo) -> Layout:
        """Return the arrangement of the ranks.

        Raises:
            UsageError: the sizes do not fit the number of ranks.
        """
        return resolve(
            self.strategy_on(rank_info),
            self.axis_sizes(),
            world_size=rank_info.world_size,
            local_world_size=rank_info.local_world_size,
        )

    def micro_batches(self, shards: int) -> int:
        """Return how many micro-batches every shard makes; the largest share decides."""
        share = math.ceil(self.global_batch / shards)
        return math.ceil(share / (self.micro_batch or share))

    def as_json(self) -> dict[str, object]:
        """Return the fields as JSON can hold them."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One field of `Config`."""

    name: str
    """In Python and in the configuration file."""
    section: str
    """Title of its section in the help."""
    kind: type
    """`bool`, `int`, `float`, `str` or `Path`, whether or not it may be None."""
    choices: tuple[str, ...]
    """The values that a text may have; empty: any. Of a number: the words in its place."""
    least: float | None
    """The smallest value; None: a number must be positive."""
    default: object
    """The value when nothing was given."""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> str:
        """The word that follows the flag in the help: none for a switch."""
        names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}
        if self.kind is str and self.choices:
            return "NAME"
        return "|".join((names[self.kind], *self.choices))

    def parse(self, text: str) -> object:
        """Make the field's value from a text of the command line.

        Raises:
            ValueError: the message names flag and value.
        """
        if not text:
            raise ValueError(f"{self.flag} needs a value")
        if text in self.choices:
            return text
        try:
            value = self.kind(text)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            what = " or ".join((what, *self.choices))
            raise ValueError(f"{self.flag} {text!r} is not {what}") from None
        if problem := self.problem_of(value):
            raise ValueError(f"{self.flag}{problem}")
        return value

    def problem_of(self, value: object) -> str | None:
        """Return what is wrong with a value of the right type, to follow the field's name."""
        if self.name == "task":
            problem = problem_of(str(value))
            return f": {problem}" if problem else None
        if value in self.choices:
            return None
        if self.choices and self.kind is str:
            word = self.name.replace("_", " ")
            choices = ", ".join(self.choices)
            return (
                f": unknown {word} {value!r}{nearest(str(value), self.choices)} (known: {choices})"
            )
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if not math.isfinite(value) or (self.least is None and value <= 0):
            return f" {value} must be a positive, finite number"
        if self.least is not None and value < self.least:
            return f" {value} is too small: at least {self.least:g}"
        return None


@cache
def fields() -> dict[str, ConfigField]:
    """Describe the fields of `Config`, by name and in its order."""
    by_name, section = {}, ""
    for field in dataclasses.fields(Config):
        section = SECTIONS.get(field.name, section)
        kind, choices, least = _parse_hint(field.type)
        by_name[field.name] = ConfigField(
            name=field.name,
            section=section,
            kind=kind,
            choices=choices,
            least=least,
            default=field.default,
        )
    return by_name


SYNONYMS = {
    "learning-rate": "--lr",
    "batch-size": "--global-batch",
    "train-batch-size": "--global-batch",
    "per-device-train-batch-size": "--micro-batch",
    "micro-batch-size": "--micro-batch",
    "output-dir": "--run-dir",
    "max-steps": "--steps",
    "num-train-epochs": "--epochs",
    "max-grad-norm": "--clip-norm",
    "nproc": "--spawn",
}
"""The names of fields in other trainers."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Suggest the word that was probably meant: `; did you mean 'x'?`, or ''."""
    words = list(words)
    if (synonym := SYNONYMS.get(word.removeprefix("--").replace("_", "-"))) in words:
        return f"; did you mean {synonym!r}?"
    # Without the dashes, which make all flags look alike.
    bare = {word.removeprefix("--"): word for word in words}
    close = difflib.get_close_matches(word.removeprefix("--"), list(bare), n=1)
    return f"; did you mean {bare[close[0]]!r}?" if close else ""


def field_docs(cls: type) -> dict[str, str]:
    """Read the docstring under each field of a class from its source."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = " ".join(doc.split())
    return docs


def _parse_hint(hint: object) -> tuple[type, tuple[str, ...], float | None]:
    """Take a type hint apart: the plain type, its choices, its smallest value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, choices, least = _parse_hint(arguments[0])
        limits = [limit.least for limit in arguments[1:] if isinstance(limit, AtLeast)]
        return kind, choices, limits[0] if limits else least
    if origin is typing.Literal:
        return str, arguments, None
    if origin is not None:  # X | None, or a number | a word
        kind, choices, least = _parse_hint(next(one for one in arguments if one is not type(None)))
        words = [_parse_hint(one)[1] for one in arguments if typing.get_origin(one) is Literal]
        return kind, choices or tuple(itertools.chain(*words)), least
    assert isinstance(hint, type), f"fields are of plain types, not {hint}"
    return hint, (), None
