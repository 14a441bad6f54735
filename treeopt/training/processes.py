"""The processes that train together, when ``accelerate launch`` or ``torchrun`` started several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Processes:
    """Which one this process is, from 0, of how many; alone by default.

    They share a file system and hold the same weights; each works on a share of every batch, and
    gradients are summed, so that what is learned does not depend on their number.
    """

    index: int = 0
    count: int = 1
    device: str | None = None  # the launcher's choice for this process

    @classmethod
    def launched(cls) -> Processes:
        """Join those that a launcher started, if one did."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, str(state.device))

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.index == 0

    @property
    def share(self) -> slice:
        """This process's part of any sequence."""
        return slice(self.index, None, self.count)

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.count > 1:
            torch.distributed.barrier()

    def sum_(self, parameters: Sequence[Parameter], counters: Tensor) -> None:
        """Replace gradients and float32 ``counters`` by their sums over all processes."""
        if self.count == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.float() for p in parameters]
        parts = [*gradients, counters.to(gradients[0].device)]
        flat = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(flat)
        *sums, total = flat.split([part.numel() for part in parts])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient.view_as(parameter)
        counters.copy_(total)


ALONE = Processes()
