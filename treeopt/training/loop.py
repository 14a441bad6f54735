"""The training loop that Medusa-1 and Medusa-2 share.

AdamW, a short warm-up and a cosine to zero; resumable batch by batch; the same for one process and
for several.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from treeopt.errors import DataError
from treeopt.files import replacing
from treeopt.training.processes import ALONE, Processes

_WARM_UP = 0.02
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Plan:
    """How long and in what order to train.

    batch_size: items per step, of all processes together.
    checkpoint: file that a run goes on from; written after every epoch and on Ctrl-C, and deleted
        when the last epoch is done.
    """

    epochs: int
    batch_size: int
    seed: int = 0
    checkpoint: Path | None = None
    processes: Processes = ALONE


@dataclass(frozen=True)
class Score:
    """How the models do on held-out answers.

    top1, top5: each head's rates.
    acceptance_length: replayed with trees of 64 rows that a document had no part in; None where
        the answers are too few for that.
    kl: mean KL(original ‖ tuned) in nats, where the backbone is trained too.
    agreement: share of the original's greedy tokens that the tuned backbone would choose as well.
    """

    top1: list[float]
    top5: list[float]
    acceptance_length: float | None
    kl: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Epoch:
    """What one epoch did.

    loss: mean over its batches.
    best: no earlier epoch accepted more; without acceptance lengths the latest counts as best.
    """

    number: int
    loss: float
    score: Score
    best: bool


class Task(ABC):
    """What is trained, on what."""

    @property
    @abstractmethod
    def num_items(self) -> int:
        """How many items batches are drawn from."""

    @property
    @abstractmethod
    def parameters(self) -> list[tuple[float, list[Parameter]]]:
        """Learning rates, and what learns at them."""

    @property
    @abstractmethod
    def modules(self) -> dict[str, torch.nn.Module]:
        """What a checkpoint keeps, by name."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that stopped."""

    @abstractmethod
    def backward(self, batch: Tensor, progress: float, processes: Processes) -> float:
        """Add the gradients of this process's share of ``batch``; return its part of the loss.

        batch: int64 [n], the items of all processes. progress: 0 at the first step, to 1.
        """

    @abstractmethod
    def score(self) -> Score:
        """Return how the models do on held-out answers."""


def fit(task: Task, plan: Plan) -> Iterator[Epoch]:
    """Train ``task``; the first process yields after every epoch.

    Raises:
        DataError: the loss is not finite, or the checkpoint is of another run.
        KeyboardInterrupt: after the checkpoint is written.
    """
    groups = [{"params": params, "lr": rate} for rate, params in task.parameters]
    learned = [parameter for _, params in task.parameters for parameter in params]
    steps_per_epoch = math.ceil(task.num_items / plan.batch_size)
    total = plan.epochs * steps_per_epoch
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, total))
    settings = {
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "items": task.num_items,
        **task.settings,
    }
    run = _Run(plan, settings, {**task.modules, "optimiser": optimiser, "schedule": schedule})
    run.resume()
    generator = torch.Generator().manual_seed(plan.seed)
    with _interrupt_deferred() as interrupted:
        for number in range(1, plan.epochs + 1):
            batches = torch.randperm(task.num_items, generator=generator).split(plan.batch_size)
            if number < run.epoch:
                continue
            for batch in batches[run.batch :]:
                optimiser.zero_grad()
                loss = task.backward(batch, schedule.last_epoch / total, plan.processes)
                # One process that is told to stop stops all, after the same batch.
                counters = torch.tensor([loss, float(interrupted())])
                plan.processes.sum_(learned, counters)
                loss, stops = counters.tolist()
                run.check(loss)
                torch.nn.utils.clip_grad_norm_(learned, _LARGEST_GRADIENT)
                optimiser.step()
                schedule.step()
                run.batch, run.losses = run.batch + 1, run.losses + loss
                if stops:
                    run.save()
                    raise KeyboardInterrupt
            if plan.processes.is_main:
                yield run.end_epoch(task.score())
            run.next_epoch()
    run.forget()


@dataclass
class _Run:
    """How far training is, and the file that keeps it.

    epoch: the one in progress, from 1. batch: batches of it that are done. losses: their sum.
    parts: what has state, by name.
    """

    plan: Plan
    settings: dict[str, Any]
    parts: dict[str, Any]
    epoch: int = 1
    batch: int = 0
    losses: float = 0.0
    best: float = field(default=-math.inf)

    _COUNTERS = ("epoch", "batch", "losses", "best")

    def resume(self) -> None:
        """Go on from the file, if there is one."""
        file = self.plan.checkpoint
        if file is None or not file.exists():
            return
        try:
            value = torch.load(file, weights_only=True)
            settings = value["settings"]
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
            raise DataError(f"{file} is not a checkpoint of `treeopt train`") from error
        for key in {**self.settings, **settings}:
            if (theirs := settings.get(key)) != (ours := self.settings.get(key)):
                raise DataError(
                    f"{file} is of a run with another {key}: {theirs}, not {ours}; "
                    "repeat that run's command, or delete the file to start anew"
                )
        for name in self._COUNTERS:
            setattr(self, name, value[name])
        for name, part in self.parts.items():
            part.load_state_dict(value[name])

    def check(self, loss: float) -> None:
        """Raise DataError when ``loss`` is no number."""
        if not math.isfinite(loss):
            raise DataError(
                f"the loss is {loss} at epoch {self.epoch}, batch {self.batch + 1}; heads saved "
                "before are as they were, a smaller learning rate may go further"
            )

    def end_epoch(self, score: Score) -> Epoch:
        """Return the epoch that is done."""
        length = score.acceptance_length
        value = float(self.epoch) if length is None else length
        best, self.best = value > self.best, max(value, self.best)
        return Epoch(self.epoch, self.losses / self.batch, score, best)

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, 0.0
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.plan.checkpoint is None or not self.plan.processes.is_main:
            return
        states = {name: part.state_dict() for name, part in self.parts.items()}
        counters = {name: getattr(self, name) for name in self._COUNTERS}
        with replacing(self.plan.checkpoint) as temporary, Path(temporary).open("wb") as file:
            torch.save({"settings": self.settings, **counters, **states}, file)

    def forget(self) -> None:
        if self.plan.checkpoint is not None and self.plan.processes.is_main:
            self.plan.checkpoint.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back, so that it cuts no step in two; yield what tells whether it came."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _rate(step: int, total: int) -> float:
    warm_up = max(1, int(_WARM_UP * total))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))
