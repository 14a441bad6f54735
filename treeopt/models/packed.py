"""Linear layers whose bfloat16 weights are laid out for the CPU's matrix unit once.

Without this, every call of a bfloat16 linear layer on a CPU rearranges its weight first, which
costs a third of a decode step. The layers live in a twin of the model that shares its parameters,
so the original stays as transformers made it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 16  # the number of rows that the layout is chosen for


def packed_twin(model: Any) -> Any:
    """Return a twin of ``model`` with packed linear layers, or None where that cannot be.

    Packing needs a CPU, bfloat16 weights and a torch build with oneDNN. It costs the memory of
    the linear layers' weights once more.
    """
    onednn = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    if not onednn or model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return None
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    _pack(twin)
    return twin


class PackedLinear(nn.Module):
    """A frozen linear layer that reads a packed copy of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., out] for ``hidden`` [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")


def _pack(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:  # quantised layers bring kernels of their own
            setattr(module, name, PackedLinear(child))
        else:
            _pack(child)
