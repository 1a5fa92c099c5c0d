"""A grammar of models as people write them: layers, and what else happens to weights and buffers.

A model is a few blocks, each of which is a few features, and some links between blocks. It is
written as a file with a task, as a user would write it: what fails is shown as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

WIDTH, TIME, SAMPLES, BATCH = 4, 4, 48, 12


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A part of a block."""

    init: str = ""
    """What `__init__` does."""
    forward: str = ""
    """What `forward` makes of `hidden`, of shape [samples, width] or [samples, time, width]."""
    also: str = ""
    """A class or function beside the block."""
    flat: bool = False
    """Whether it takes no time."""
    random: bool = False
    """Whether it draws random numbers: no two ways to cut a batch draw alike."""
    later: bool = False
    """Whether it changes the model in a later step, where it may be refused as well."""
    forgotten: bool = False
    """Whether it keeps something that no checkpoint holds."""


def _linear(name: str, more: str = "") -> str:
    return f"self.{name} = nn.Linear(W, W){more}"


FEATURES: dict[str, Feature] = {
    "linear": Feature(
        init=_linear("linear"), forward="hidden = torch.tanh(self.linear(hidden))"
    ),
    "mlp": Feature(
        init="self.up, self.down = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)",
        forward="hidden = hidden + self.down(torch.tanh(self.up(hidden)))",
    ),
    "layer norm": Feature(init="self.norm = nn.LayerNorm(W)", forward="hidden = self.norm(hidden)"),
    "own matrix": Feature(
        init="self.matrix = nn.Parameter(torch.randn(W, W) / W)",
        forward="hidden = hidden + hidden @ self.matrix",
    ),
    "scalar": Feature(
        init="self.factor = nn.Parameter(torch.tensor(1.1))",
        forward="hidden = hidden * self.factor",
    ),
    "shift of one number": Feature(
        init="self.shift = nn.Parameter(torch.zeros(1))", forward="hidden = hidden + self.shift"
    ),
    "complex": Feature(
        init="self.turn = nn.Parameter(torch.randn(W // 2, dtype=torch.complex128))",
        forward="pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous())\n"
        "hidden = torch.view_as_real(pairs * self.turn).flatten(-2)",
    ),
    "weight norm": Feature(
        init="self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))",
        forward="hidden = hidden + self.normed(hidden)",
    ),
    "spectral norm": Feature(
        init="self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
        forward="hidden = hidden + self.spectral(hidden)",
    ),
    "orthogonal": Feature(
        init="self.turning = nn.utils.parametrizations.orthogonal(nn.Linear(W, W))",
        forward="hidden = self.turning(hidden)",
    ),
    "own parametrization": Feature(
        init=_linear("scaled")
        + "\nnn.utils.parametrize.register_parametrization(self.scaled, 'weight', Halved())",
        forward="hidden = hidden + self.scaled(hidden)",
        also="class Halved(nn.Module):\n    def forward(self, weight):\n"
        "        return 0.5 * weight",
    ),
    "pruned": Feature(
        init=_linear("pruned")
        + "\nnn.utils.prune.ln_structured(self.pruned, 'weight', amount=0.5, n=2, dim=0)",
        forward="hidden = hidden + self.pruned(hidden)",
        also="import torch.nn.utils.prune",
    ),
    "own function": Feature(
        init=_linear("squared"),
        forward="hidden = hidden + Square.apply(self.squared(hidden))",
        also="class Square(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n        return 0.1 * x * x\n\n    @staticmethod\n"
        "    def backward(ctx, gradient):\n        return 0.2 * ctx.saved_tensors[0] * gradient",
    ),
    "checkpoint": Feature(
        init=_linear("again"),
        forward="hidden = hidden + checkpoint(self.again, hidden, use_reentrant=False)",
        also="from torch.utils.checkpoint import checkpoint",
    ),
    "reentrant checkpoint": Feature(
        init=_linear("reentrant"),
        forward="hidden = hidden + checkpoint(self.reentrant, hidden, use_reentrant=True)",
        also="from torch.utils.checkpoint import checkpoint",
    ),
    "batch norm": Feature(
        init="self.batch_norm = nn.BatchNorm1d(W)", forward="hidden = self.batch_norm(hidden)",
        flat=True,
    ),
    "batch norm, cumulative": Feature(
        init="self.cumulative = nn.BatchNorm1d(W, momentum=None, affine=False)",
        forward="hidden = self.cumulative(hidden)", flat=True,
    ),
    "batch norm without statistics": Feature(
        init="self.batch_only = nn.BatchNorm1d(W, track_running_stats=False)",
        forward="hidden = self.batch_only(hidden)", flat=True,
    ),
    "batch norm that only evaluates": Feature(
        init="self.fixed = nn.BatchNorm1d(W).eval()", forward="hidden = self.fixed(hidden)",
        flat=True,
    ),
    "lstm": Feature(
        init="self.lstm = nn.LSTM(W, W, batch_first=True)",
        forward="hidden = hidden + self.lstm(hidden.unsqueeze(1))[0].squeeze(1)", flat=True,
    ),
    "convolution": Feature(
        init="self.convolution = nn.Conv1d(1, 1, 3, padding=1)",
        forward="hidden = hidden + self.convolution(hidden.unsqueeze(1)).squeeze(1)", flat=True,
    ),
    "attention": Feature(
        init="self.mix, self.attention = nn.Linear(W, 3 * W), CausalAttention()",
        forward="query, key, value = self.mix(hidden).unflatten(-1, (2, -1)).transpose(1, 2)"
        ".chunk(3, dim=-1)\n"
        "hidden = hidden + self.attention(query, key, value).transpose(1, 2).flatten(2)",
        also="from train.layers import CausalAttention",
    ),
    "experts": Feature(
        init="self.router = nn.Linear(W, 2)\n"
        "self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(2))",
        forward="share = self.router(hidden).softmax(-1)\nway = share.argmax(-1)\n"
        "mixed = torch.zeros_like(hidden)\nfor number, expert in enumerate(self.experts):\n"
        "    rows = way == number\n"
        "    mixed[rows] = expert(hidden[rows]) * share[rows][:, [number]]\n"
        "hidden = hidden + mixed",
        flat=True,
    ),
    "branch on data": Feature(
        init="self.one, self.other = nn.Linear(W, W), nn.Linear(W, W)",
        # Behind a norm the sum is 0, but for rounding, which would decide on a branch at 0.
        forward="one = hidden.detach().sum() > 0.1\n"
        "hidden = hidden + (self.one if one else self.other)(hidden)",
    ),
    "branch on a number": Feature(
        init="self.small, self.large = nn.Linear(W, W), nn.Linear(W, W)",
        forward="large = float(hidden.detach().abs().mean()) * 2 > 1.7\n"
        "hidden = hidden + (self.large if large else self.small)(hidden)",
    ),
    "branch on any": Feature(
        init="self.tame, self.wild = nn.Linear(W, W), nn.Linear(W, W)",
        forward="wild = (hidden.detach() > 2.5).any()\n"
        "hidden = hidden + (self.wild if wild else self.tame)(hidden)",
    ),
    "guard": Feature(
        forward="assert hidden.isfinite().all()\nif hidden.isnan().any():\n"
        "    hidden = hidden.nan_to_num()",
    ),
    "experts that may rest": Feature(
        init="self.choice = nn.Linear(W, 3)\n"
        "self.workers = nn.ModuleList(nn.Linear(W, W) for _ in range(3))",
        forward="shares = self.choice(hidden).softmax(-1)\nchosen = shares.argmax(-1)\n"
        "done = torch.zeros_like(hidden)\nfor number, worker in enumerate(self.workers):\n"
        "    mine = chosen == number\n"
        "    if mine.any():\n"
        "        done[mine] = worker(hidden[mine]) * shares[mine][:, [number]]\n"
        "hidden = hidden + done",
        flat=True,
    ),
    "branch by turns": Feature(
        init="self.first, self.second, self.turns = nn.Linear(W, W), nn.Linear(W, W), 0",
        forward="if self.training:\n    self.turns += 1\n"
        "hidden = hidden + (self.first if self.turns % 2 else self.second)(hidden)",
        forgotten=True,
    ),
    "loop": Feature(
        init=_linear("repeated"),
        forward="for _ in range(3):\n    hidden = torch.tanh(self.repeated(hidden))",
    ),
    "whole batch": Feature(
        init=_linear("centred"),
        forward="centred = hidden - hidden.mean(0) if len(hidden) else hidden\n"
        "hidden = hidden + self.centred(centred)",
    ),
    "unused": Feature(init=_linear("unused")),
    "frozen": Feature(
        init=_linear("frozen", ".requires_grad_(False)"),
        forward="hidden = hidden + self.frozen(hidden)",
    ),
    "thawed": Feature(
        init=_linear("thawed", ".requires_grad_(False)") + "\nself.passes = 0",
        forward="self.passes += self.training\nif self.passes == 2:\n"
        "    self.thawed.requires_grad_(True)\nhidden = hidden + self.thawed(hidden)",
        later=True, forgotten=True,
    ),
    "no dropout": Feature(
        init="self.dropout = nn.Dropout(0.0)", forward="hidden = self.dropout(hidden)"
    ),
    "dropout": Feature(
        init="self.dropping = nn.Dropout(0.5)", forward="hidden = hidden + self.dropping(hidden)",
        random=True,
    ),
    "noise": Feature(
        forward="hidden = hidden + 0.1 * torch.randn_like(hidden) * random.random()",
        also="import random", random=True,
    ),
    "numpy noise": Feature(
        forward="hidden = hidden + 0.1 * numpy.random.rand()", also="import numpy", random=True
    ),
    "embedding": Feature(
        init="self.rows = nn.Embedding(2, W)",
        forward="hidden = hidden + self.rows((hidden[..., 0] > 0).long())",
    ),
    "sparse embedding": Feature(
        init="self.sparse = nn.Embedding(2, W, sparse=True)",
        forward="hidden = hidden + self.sparse((hidden[..., 0] > 0).long())",
    ),
    "embedding of bounded rows": Feature(
        init="self.bounded = nn.Embedding(2, W, max_norm=0.5)",
        forward="hidden = hidden + self.bounded((hidden[..., 0] > 0).long())",
        later=True,
    ),
    "clamped weight": Feature(
        init=_linear("clamped"),
        forward="with torch.no_grad():\n    self.clamped.weight.clamp_(-0.2, 0.2)\n"
        "hidden = hidden + self.clamped(hidden)",
    ),
    "weight scaled by data": Feature(
        init=_linear("moved") + "\nself.started = False",
        forward="if not self.started and self.training and len(hidden):\n"
        "    self.moved.weight.data /= hidden.detach().abs().mean() + 1\n    self.started = True\n"
        "hidden = hidden + self.moved(hidden)",
        forgotten=True,
    ),
    "teacher": Feature(
        init=_linear("student") + "\n" + _linear("teacher", ".requires_grad_(False)"),
        forward="if self.training:\n"
        "    self.teacher.weight.data.lerp_(self.student.weight.data, 0.1)"
        "\nhidden = hidden + self.student(hidden) * torch.sigmoid(self.teacher(hidden))",
    ),
    "constant": Feature(
        init="self.register_buffer('table', torch.arange(W) / W)",
        forward="hidden = hidden + self.table",
    ),
    "constant that is not saved": Feature(
        init="self.register_buffer('angles', torch.arange(W) / W, persistent=False)",
        forward="hidden = hidden + self.angles",
    ),
    "running mean": Feature(
        init="self.register_buffer('mean', torch.zeros(W))",
        forward="if self.training and len(hidden):\n"
        "    self.mean.lerp_(hidden.detach().flatten(0, -2).mean(0), 0.1)",
    ),
    "running mean that is read": Feature(
        init="self.register_buffer('average', torch.zeros(W))",
        forward="if self.training and len(hidden):\n"
        "    self.average.lerp_(hidden.detach().flatten(0, -2).mean(0), 0.1)\n"
        "hidden = hidden - self.average",
    ),
    "running mean, read before it moves": Feature(
        init="self.register_buffer('before', torch.zeros(W))",
        forward="centred = hidden - self.before\nif self.training and len(hidden):\n"
        "    self.before.lerp_(hidden.detach().flatten(0, -2).mean(0), 0.1)\nhidden = centred",
    ),
    "running mean that is replaced": Feature(
        init="self.register_buffer('new', torch.zeros(W))",
        forward="if self.training and len(hidden):\n"
        "    self.new = 0.9 * self.new + 0.1 * hidden.detach().flatten(0, -2).mean(0)",
    ),
    "running mean that is not saved": Feature(
        init="self.register_buffer('light', torch.zeros(W), persistent=False)",
        forward="centred = hidden - self.light\nif self.training and len(hidden):\n"
        "    self.light.lerp_(hidden.detach().flatten(0, -2).mean(0), 0.1)\nhidden = centred",
        forgotten=True,
    ),
    "count of passes": Feature(
        init="self.register_buffer('count', torch.zeros((), dtype=torch.int64))",
        forward="self.count += self.training\nhidden = hidden / (1 + 0.1 * self.count)",
    ),
    "count of samples": Feature(
        init="self.register_buffer('seen', torch.zeros((), dtype=torch.int64))",
        forward="self.seen += len(hidden) * self.training",
    ),
    "scale by step": Feature(
        init="self.register_buffer('scale', torch.ones(()))",
        forward="if self.training:\n    self.scale *= 0.9\nhidden = hidden * self.scale",
    ),
    "remembered activation": Feature(
        init="self.last = torch.zeros(W)",
        forward="hidden, last = hidden + 0.1 * self.last, hidden\n"
        "if self.training and len(hidden):\n"
        "    self.last = last.detach().flatten(0, -2).mean(0)",
        forgotten=True,
    ),
    "hook on a parameter": Feature(
        init=_linear("hooked") + "\nself.hooked.weight.register_hook(lambda g: 0.5 * g)",
        forward="hidden = hidden + self.hooked(hidden)",
    ),
    "hook after accumulation": Feature(
        init=_linear("halved") + "\nself.halved.weight.register_post_accumulate_grad_hook(halve)",
        forward="hidden = hidden + self.halved(hidden)",
        also="def halve(parameter):\n    parameter.grad *= 0.5",
    ),
    "hook on a layer's output": Feature(
        init=_linear("after") + "\nself.after.register_forward_hook(lambda m, i, out: 0.5 * out)",
        forward="hidden = hidden + self.after(hidden)",
    ),
    "hook on a layer's input": Feature(
        init=_linear("into") + "\nself.into.register_forward_pre_hook(lambda m, i: (0.5 * i[0],))",
        forward="hidden = hidden + self.into(hidden)",
    ),
    "hook on a layer's gradient": Feature(
        init=_linear("back")
        + "\nself.back.register_full_backward_hook(lambda m, i, o: (0.5 * i[0],))",
        forward="hidden = hidden + self.back(hidden)",
    ),
    "hook on an activation": Feature(
        init=_linear("active"),
        forward="active = self.active(hidden)\nif active.requires_grad:\n"
        "    active.register_hook(lambda g: 0.5 * g)\nhidden = hidden + active",
    ),
    "weight in a list": Feature(
        init=_linear("listed") + "\nself.held = [self.listed.weight]",
        forward="hidden = hidden + hidden @ self.held[0] + self.listed(hidden)",
    ),
    "view of a weight": Feature(
        init=_linear("viewed") + "\nself.view = self.viewed.weight[0]",
        forward="hidden = hidden * self.view + self.viewed(hidden)",
    ),
    "slice of a weight": Feature(
        init=_linear("sliced"),
        forward="hidden = hidden * self.sliced.weight[0] + self.sliced(hidden)",
    ),
    "activation in place": Feature(
        init=_linear("straight") + "\nself.relu = nn.ReLU(inplace=True)",
        forward="hidden = hidden + self.relu(self.straight(hidden))",
    ),
    "input changed in place": Feature(forward="hidden *= 0.5"),
    "output that is not contiguous": Feature(
        forward="hidden = hidden.transpose(0, -1).contiguous().transpose(0, -1)"
    ),
    "without gradient": Feature(
        init=_linear("features"),
        forward="with torch.no_grad():\n    extra = self.features(hidden)\nhidden = hidden + extra",
    ),
    "detached": Feature(
        init=_linear("beside"), forward="hidden = hidden + self.beside(hidden.detach())"
    ),
    "list of parameters": Feature(
        init="self.several = nn.ParameterList(torch.randn(W) for _ in range(2))",
        forward="for one in self.several:\n    hidden = hidden + one",
    ),
    "functional call": Feature(
        init=_linear("called"),
        forward="weights = {n: 0.5 * p for n, p in self.called.named_parameters()}\n"
        "hidden = hidden + torch.func.functional_call(self.called, weights, hidden)",
    ),
    "random constant": Feature(
        init="self.register_buffer('codes', torch.randn(W))",
        forward="hidden = hidden + self.codes",
    ),
    "random constant that is not saved": Feature(
        init="self.register_buffer('marks', torch.randn(W), persistent=False)",
        forward="hidden = hidden + self.marks",
    ),
    "batch norm that forward() has evaluate": Feature(
        init="self.quiet = nn.BatchNorm1d(W)",
        forward="self.quiet.eval()\nhidden = self.quiet(hidden)", flat=True,
    ),
    "layer of its own mode": Feature(
        init="self.still = Still()", forward="hidden = self.still(hidden)",
        also="class Still(nn.BatchNorm1d):\n    def __init__(self):\n"
        "        super().__init__(W)\n        self.train()\n\n    def train(self, mode=True):\n"
        "        return super().train(False)", flat=True,
    ),
    "gradient of its input": Feature(
        init=_linear("curved"),
        forward="with torch.enable_grad():\n    inner = hidden.detach().requires_grad_()\n"
        "    out = torch.tanh(self.curved(inner)).sum()\n"
        "    (slope,) = torch.autograd.grad(out, inner, create_graph=True)\n"
        "hidden = hidden + slope",
    ),
}  # fmt: skip

LINKS: dict[str, str] = {
    "tied": "{last}.linear.weight = {first}.linear.weight",
    "shared layer": "{last}.linear = {first}.linear",
    "repeated block": "{last} = {first}",
}
"""What blocks have in common, the first and the last with a `linear` layer."""
LOSSES: dict[str, tuple[str, str]] = {
    "sum": ("", "(outputs - targets).square().sum()"),
    "declared mean": ('reduction = "mean"', "(outputs - targets).square().sum(-1).mean()"),
    "mean": ("", "(outputs - targets).square().mean()"),
    "reads weights": (
        "",
        "(outputs - targets).square().sum() + len(targets) * sum(p.abs().square().sum() "
        "for p in self.net.parameters())",
    ),
    "decides": (
        "",
        "(lambda loss: loss if loss.item() < 30 else loss * 0.5)"
        "((outputs - targets).square().sum())",
    ),
    "contrastive": ("", "-(outputs @ targets.mT).log_softmax(-1).diagonal().sum()"),
}
ROOTS = ("sequential", "pieces", "whole")
INPUTS, OUTPUTS = ("tensor", "dict", "pair"), ("tensor", "dict", "pair")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A drawn model."""

    blocks: tuple[tuple[str, ...], ...]
    """The features of each block."""
    links: tuple[str, ...] = ()
    root: str = "pieces"
    loss: str = "sum"
    inputs: str = "tensor"
    outputs: str = "tensor"
    time: bool = False
    """Whether samples are sequences."""

    @property
    def features(self) -> set[str]:
        return {name for block in self.blocks for name in block}

    @property
    def is_random(self) -> bool:
        return any(FEATURES[name].random for name in self.features)

    @property
    def forgets(self) -> bool:
        return any(FEATURES[name].forgotten for name in self.features)

    @property
    def changes_later(self) -> bool:
        return any(FEATURES[name].later for name in self.features)

    def simpler(self) -> Iterator[Model]:
        """Yield models with a part less, larger parts first."""
        for number, block in enumerate(self.blocks):
            rest = (*self.blocks[:number], *self.blocks[number + 1 :])
            if rest:
                yield replace(self, blocks=rest)
            for name in block:
                left = tuple(one for one in block if one != name)
                shorter = (*self.blocks[:number], left, *self.blocks[number + 1 :])
                if left:
                    yield replace(self, blocks=shorter)
        if self.links:
            yield replace(self, links=())
        plain = Model(blocks=self.blocks)
        for name in ("loss", "inputs", "outputs", "time", "root"):
            changes: dict[str, Any] = {name: getattr(plain, name)}
            if getattr(self, name) != changes[name]:
                yield replace(self, **changes)


def drawn(source: random.Random) -> Model:
    """Draw a model."""
    time = source.random() < 0.3
    names = [
        name
        for name, feature in FEATURES.items()
        if not (time and feature.flat) and (time or name != "attention")
    ]  # fmt: skip
    plain = ["linear", "mlp", "layer norm", *(["attention"] if time else [])]
    blocks = []
    for _ in range(source.choice([2, 3, 4, 4, 5])):
        # Most blocks are ordinary: with everything at once, all models would be refused.
        some = [source.choice(plain)]
        some += source.sample(names, source.choice([0, 0, 0, 0, 1, 1, 2]))
        blocks.append(tuple(dict.fromkeys(some)))
    return Model(
        blocks=tuple(blocks),
        links=(source.choice([*LINKS]),) if source.random() < 0.2 else (),
        root=source.choice(ROOTS[:2]) if source.random() < 0.8 else "whole",
        loss="sum" if source.random() < 0.8 else source.choice([*LOSSES]),
        inputs=source.choice([*INPUTS[:1] * 3, *INPUTS]),
        outputs=source.choice([*OUTPUTS[:1] * 3, *OUTPUTS]),
        time=time,
    )


def _indented(text: str, by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for line in text.splitlines())


def source_of(model: Model) -> str:
    """Write the model as a file with a task."""
    also = dict.fromkeys(FEATURES[name].also for name in sorted(model.features))
    imports = sorted(text for text in also if text.startswith(("import ", "from ")))
    helpers = [text for text in also if text and text not in imports]
    shape = f"{SAMPLES}, {TIME}, W" if model.time else f"{SAMPLES}, W"
    text = "\n".join(
        [
            *imports, "import torch", "from torch import nn", "",
            "from train.data.order import Batch", "from train.tasks import Task", "",
            "torch.set_default_dtype(torch.float64)", f"W = {WIDTH}", "",
            *(f"\n{helper}\n" for helper in helpers), "",
        ]
    )  # fmt: skip
    for number, block in enumerate(model.blocks):
        text += f"\nclass Block{number}(nn.Module):\n    def __init__(self):\n"
        text += "        super().__init__()\n"
        text += "".join(_indented(FEATURES[name].init, 8) for name in block)
        text += "\n    def forward(self, hidden):\n"
        text += "".join(_indented(FEATURES[name].forward, 8) for name in block)
        text += "        return hidden\n\n"
    text += _ends(model) + _net(model)
    text += "\nclass Drawn(Task):\n"
    declared, loss = LOSSES[model.loss]
    text += f"    {declared}\n\n" if declared else ""
    if model.loss == "reads weights":
        text += "    def model(self):\n        self.net = made()\n        return self.net\n"
    else:
        text += "    def model(self):\n        return made()\n"
    taken = {"tensor": "", "dict": "outputs = outputs['out']\n", "pair": "outputs = outputs[0]\n"}
    data = {"tensor": "x", "dict": "{'x': x, 'y': x.flip(0)}", "pair": "(x, x.flip(0))"}
    text += f"""
    def train(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn({shape}, generator=generator)
        targets = torch.randn({shape}, generator=generator)
        return Batch(inputs={data[model.inputs]}, targets=targets)

    def test(self):
        return self.train().part(0, {BATCH})

    def loss(self, outputs, targets):
{_indented(taken[model.outputs], 8)}        return {loss}
"""
    if model.time:
        text += "\n    def count(self, targets):\n        return targets[..., 0].numel()\n"
    if model.root == "pieces":
        names = ["first", *(f"blocks.{n}" for n in range(len(model.blocks))), "last"]
        text += f"\n    def pieces(self, model):\n        return {names}\n"
    return text + _plan(model)


def _ends(model: Model) -> str:
    """Write the first and the last piece, which know how inputs and outputs are nested."""
    read = {"tensor": "x", "dict": "x['x'] + x['y']", "pair": "x[0] * x[1]"}[model.inputs]
    give = {"tensor": "out", "dict": "{'out': out, 'size': out.sum(-1)}", "pair": "(out, 2 * out)"}
    return f"""
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(W, W)

    def forward(self, x):
        return self.read({read})


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.give = nn.Linear(W, W)

    def forward(self, hidden):
        out = self.give(hidden)
        return {give[model.outputs]}

"""


def _net(model: Model) -> str:
    """Write how the model is put together."""
    count = len(model.blocks)
    blocks = ", ".join(f"Block{number}()" for number in range(count))
    linear = [number for number, block in enumerate(model.blocks) if "linear" in block]
    links = ""
    if len(linear) > 1:
        if model.root == "sequential":
            ends = {"first": f"net[{linear[0] + 1}]", "last": f"net[{linear[-1] + 1}]"}
        else:
            ends = {"first": f"net.blocks[{linear[0]}]", "last": f"net.blocks[{linear[-1]}]"}
        links = "".join(f"    {LINKS[name].format(**ends)}\n" for name in model.links)
    if model.root == "sequential":
        return (
            f"\ndef made():\n    net = nn.Sequential(First(), {blocks}, Last())\n{links}"
            "    return net\n\n"
        )
    return f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = First(), Last()
        self.blocks = nn.ModuleList([{blocks}])

    def forward(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def made():
    net = Net()
{links}    return net

"""


def _plan(model: Model) -> str:
    """Write how `--tp` cuts the layers of `mlp`, if there are any."""
    prefix = "{}" if model.root == "sequential" else "blocks.{}"
    shift = 1 if model.root == "sequential" else 0
    pairs = [
        f"            '{prefix.format(number + shift)}.up': ColwiseParallel(),\n"
        f"            '{prefix.format(number + shift)}.down': RowwiseParallel(),\n"
        for number, block in enumerate(model.blocks)
        if "mlp" in block
    ]
    if not pairs:
        return ""
    return (
        "\n    def tensor_plan(self, model, *, ranks=1, loss_parallel=False):\n"
        "        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n\n"
        f"        return {{\n{''.join(pairs)}        }}\n"
    )
