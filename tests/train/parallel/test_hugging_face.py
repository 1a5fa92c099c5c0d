"""Models of Hugging Face's Transformers train under ddp and fsdp as in one process."""

from __future__ import annotations

import pytest

from tests.train.support import hugging_face
from tests.train.support.ladder import Case, climb
from train.cli.config import Config

# Double precision has 2.2e-16; a fault is six orders and more above this.
MOST = 1e-9
CASES = [
    Case(
        name=f"{task}, {strategy}",
        world_size=2,
        config=Config(
            task=f"{hugging_face.__file__}:{task}", strategy=strategy, global_batch=8, lr=1e-3
        ),
    )
    for task in ("Gpt2", "Llama", "Bert")
    for strategy in ("ddp", "fsdp")
]


def test_language_models_of_the_library_train_as_in_one_process() -> None:
    if not (hugging_face.FRAMEWORKS / "transformers").exists():
        pytest.fail("needs .cache/frameworks, which tests/frameworks.sh makes")
    for name, far in climb(CASES).items():
        assert max(far.initial_weights, far.loss, far.gradients, far.weights) < MOST, name
