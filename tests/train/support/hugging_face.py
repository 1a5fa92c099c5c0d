"""Models of Hugging Face's Transformers, made small: read from .cache/frameworks."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data.order import Batch
from train.tasks.base import Task

FRAMEWORKS = Path(__file__).parents[3] / ".cache/frameworks"
SYMBOLS, TIME = 17, 6
SIZES: dict[str, Any] = {
    "vocab_size": SYMBOLS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": TIME,
}


def library() -> Any:
    """Import the library; nothing is fetched."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if str(FRAMEWORKS) not in sys.path:
        # Behind .venv: what both have is the same version.
        sys.path.append(str(FRAMEWORKS))
    return import_module("transformers")


class Language(Task):
    """Predict symbols, of sequences that are drawn."""

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        symbols = torch.randint(SYMBOLS, (24, TIME), generator=generator)
        return Batch(inputs=symbols, targets=symbols.roll(1, 1))

    def test(self) -> Batch:
        return self.train().part(0, 4)

    def count(self, targets: Tensor) -> int:
        return targets.numel()

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        scores = outputs["logits"].flatten(0, 1)
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum")


class Gpt2(Language):
    """Its head and its embedding share their matrix."""

    def model(self) -> nn.Module:
        config = library().GPT2Config(
            **SIZES, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False
        )
        model: nn.Module = library().GPT2LMHeadModel(config)
        return model


class Llama(Language):
    """Rotary positions, two heads of queries for one of keys."""

    def model(self) -> nn.Module:
        config = library().LlamaConfig(
            **SIZES, intermediate_size=16, num_key_value_heads=1, use_cache=False
        )
        model: nn.Module = library().LlamaForCausalLM(config)
        return model


class Bert(Language):
    def model(self) -> nn.Module:
        config = library().BertConfig(
            **SIZES,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model: nn.Module = library().BertForMaskedLM(config)
        return model
