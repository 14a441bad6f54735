"""The R best tokens of a row of logits, exactly and in a fixed order.

Calibration ranks tokens and the decoder drafts them; both read this list, so that a rank means the
same token in both. Equal logits are common in bfloat16: the smaller token id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CACHE_BYTES = 1 << 20  # a share of a core's second-level cache
_GROUP = 64  # logits per group; one cheap maximum over each group narrows the exact search


def top_candidates(logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the ``num_ranks`` largest logits of each row and their token ids, best first.

    Args:
        logits: [M, V].
        num_ranks: R, at most V.

    Returns:
        values [M, R] as in ``logits`` and ids int64 [M, R].

    The R best tokens lie in the R groups with the largest maxima, so only those are sorted.
    """
    rows, vocab = logits.shape
    num_groups = vocab // _GROUP
    if num_groups <= num_ranks:
        return _select(
            logits, torch.arange(vocab, device=logits.device).expand(rows, -1), num_ranks
        )
    body = logits[:, : num_groups * _GROUP].view(rows, num_groups, _GROUP)
    groups = _keys(body.amax(-1)).topk(num_ranks, dim=-1).indices
    columns = (groups[..., None] * _GROUP + torch.arange(_GROUP, device=logits.device)).flatten(1)
    if rest := vocab % _GROUP:
        tail = torch.arange(vocab - rest, vocab, device=logits.device).expand(rows, -1)
        columns = torch.cat([columns, tail], dim=1)
    return _select(logits.gather(1, columns), columns, num_ranks)


def cache_rows(logits: Tensor) -> int:
    """Return how many rows of ``logits`` [M, V] to turn into float32 at a time.

    On a CPU as many as stay in its cache, which is several times faster; elsewhere all.
    """
    return max(1, _CACHE_BYTES // (4 * logits.shape[-1])) if logits.device.type == "cpu" else 4096


def log_total(logits: Tensor) -> Tensor:
    """Return log(sum(exp(row))) of each row of ``logits`` [M, V]: float32 [M, 1]."""
    parts = logits.split(cache_rows(logits))
    return torch.cat([part.float().logsumexp(-1, keepdim=True) for part in parts])


def _select(values: Tensor, ids: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    order = _keys(values, ids).topk(num_ranks, dim=-1).indices
    return values.gather(1, order), ids.gather(1, order)


def _keys(values: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return int64 keys that order like (value rising, id falling), distinct in a row."""
    if ids is None:
        ids = torch.arange(values.shape[-1], device=values.device)
    # Adding 0.0 makes -0.0 and 0.0 equal; the bits of a float, with the negative half mirrored,
    # order like the float.
    bits = (values.float() + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) + (0xFFFFFFFF - ids)
