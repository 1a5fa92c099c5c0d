"""The training of `plain_training.py` as Lightning's documentation has it, for Slurm.

Run by srun in `benchmarks/goodput.py`, a process for each rank. Slurm's warning makes Lightning
write a checkpoint and requeue the job. Of the checkpoints that are there, the newest is loaded:
Lightning alone would take the one that it has written after a warning, however old that is.
"""

import signal
import time
from typing import Any

import torch
from lightning import pytorch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plain_training import EVERY, FOLDER, STEPS, layers, samples
from train.telemetry import Telemetry

telemetry = Telemetry()


class Regression(pytorch.LightningModule):  # type: ignore[misc]  # its types are not installed
    """The model, with a step that takes as long as the file `pace` says, and more."""

    def __init__(self) -> None:
        """Make the model."""
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Compute the loss of a batch."""
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        time.sleep(float((FOLDER / "pace").read_text()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(self.layers.parameters())


class Notes(pytorch.Callback):  # type: ignore[misc]
    """Note where the time goes."""

    def on_train_start(self, *_: object) -> None:
        """Note that the first step begins."""
        telemetry.ready()

    def on_train_batch_end(self, trainer: pytorch.Trainer, *_: object) -> None:
        """Note a step; the checkpoint after it follows, since Lightning's own callback is last."""
        telemetry.step(trainer.global_step)


class TimedCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Note how long the writing of a checkpoint takes."""

    def save_checkpoint(self, *words: Any, **named: Any) -> None:
        """Write one."""
        with telemetry.during("checkpoint"):
            super().save_checkpoint(*words, **named)


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    trainer = pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        plugins=[
            SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1),
            TimedCheckpointIO(),
        ],
        callbacks=[Notes(), ModelCheckpoint(FOLDER / "steps", every_n_train_steps=EVERY)],
        default_root_dir=FOLDER,
        max_epochs=-1,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*samples()), batch_size=8)
    whole = [*FOLDER.glob("hpc_ckpt_*.ckpt"), *FOLDER.glob("steps/*.ckpt")]
    newest = max(whole, key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Regression(), loader, ckpt_path=newest)


if __name__ == "__main__":
    main()
