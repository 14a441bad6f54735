"""Linear layers whose weights are laid out for the CPU's vector or matrix unit once.

Without this, every call of a linear layer on a CPU rearranges its weight first, or runs a kernel
made for many rows: a third of a decode step in bfloat16 with a matrix unit, and as much in float32
without one. The layers live in a twin of the model that shares its parameters, so the original
stays as transformers made it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 16  # the number of rows that the layout is chosen for


def packed_twin(model: Any) -> Any:
    """Return a twin of ``model`` with packed linear layers, or None where that cannot be.

    Packing needs a CPU, a torch build with oneDNN, and weights in float32 or in a bfloat16 that
    oneDNN computes with on this CPU. It costs the memory of the linear layers' weights once more.
    """
    if model.device.type != "cpu" or not _can_pack(model.dtype):
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


def _can_pack(dtype: torch.dtype) -> bool:
    onednn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(onednn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:  # needs AVX-512 or newer; others raise
        return bool(onednn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _pack(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:  # quantised layers bring kernels of their own
            setattr(module, name, PackedLinear(child))
        else:
            _pack(child)
