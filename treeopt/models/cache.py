"""Preallocated key-value caches, and the only place that touches transformers' cache interface.

Legend: ``L`` layers, ``B`` rows, ``H`` key-value heads, ``C`` capacity in tokens, ``D`` head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from treeopt.errors import ModelError


class KVCache:
    """Keys and values of every layer in one block, written in place.

    One block makes "move the accepted path to its place" one gather instead of one per layer.

    buffer: [2, L, B, H, C, D] — keys at index 0, values at 1; allocated by the first forward call,
        which knows the shapes.
    length: tokens that are valid; whatever lies beyond is scratch space of the current step.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.buffer: Tensor | None = None
        self.num_layers = num_layers
        self._adapter = _Adapter(self, num_layers)

    def run(self, model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Return the final hidden states [B, n, d] of ``input_ids`` [B, n] and append their KV."""
        num_new = input_ids.shape[1]
        self.check_room(num_new)
        kwargs[cache_argument(type(model))] = self._adapter
        hidden = model(input_ids=input_ids, use_cache=True, **kwargs).last_hidden_state
        self.advance(num_new)
        return hidden

    def check_room(self, num_new: int) -> None:
        """Raise ModelError unless ``num_new`` more tokens fit."""
        if self.length + num_new > self.capacity:
            raise ModelError(
                f"{self.length} + {num_new} tokens do not fit a cache of {self.capacity}"
            )

    def advance(self, num_new: int) -> None:
        """Count ``num_new`` entries that a forward call wrote."""
        self.length += num_new

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows ``rows`` int64 [B']."""
        assert self.buffer is not None
        self.buffer = self.buffer.index_select(2, rows)

    def reset(self) -> None:
        """Forget every token; the memory stays."""
        self.length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's ``keys``, ``values`` [B, H, n, D]; return all up to and with them."""
        if self.buffer is None:
            self.buffer = self._allocate(keys)
        end = self.length + keys.shape[2]
        if keys.shape[1::2] != self.buffer.shape[3::2] or values.shape != keys.shape:
            raise ModelError("layers with unlike key-value shapes cannot share one cache")
        self.buffer[0, layer, :, :, self.length : end] = keys
        self.buffer[1, layer, :, :, self.length : end] = values
        return self.buffer[0, layer, :, :, :end], self.buffer[1, layer, :, :, :end]

    def _allocate(self, keys: Tensor) -> Tensor:
        rows, heads, _, size = keys.shape
        return keys.new_zeros((2, self.num_layers, rows, heads, self.capacity, size))


class RaggedCache(KVCache):
    """A cache whose rows hold texts of unlike length.

    A forward call writes row b at ``lengths[b], lengths[b] + 1, …`` and leaves the lengths as they
    are; ``keep`` says which of the new entries stay.

    lengths: int64 [B] — valid tokens of each row.
    length: the longest row's tokens, kept on the host: forward calls read no column beyond it and
        their own.
    """

    def __init__(self, num_layers: int, capacity: int, num_rows: int, device: torch.device) -> None:
        super().__init__(num_layers, capacity)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(num_rows, device=device)[:, None]
        self._slots = self._rows

    @property
    def num_rows(self) -> int:
        """B."""
        return self.lengths.numel()

    def row(self, index: int) -> KVCache:
        """Return an empty cache that shares the memory of row ``index``, to fill with a prompt."""
        return _Row(self, index)

    def set_length(self, row: int, length: int) -> None:
        """Say that row ``row`` holds ``length`` valid tokens."""
        self.lengths[row] = length

    def run(self, model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Return what ``KVCache.run`` does; the rows' lengths stay."""
        self._slots = self.lengths[:, None] + torch.arange(
            input_ids.shape[1], device=input_ids.device
        )
        return super().run(model, input_ids, **kwargs)

    def advance(self, num_new: int) -> None:
        """Do nothing: ``keep`` says which of the new entries count."""

    def keep(self, paths: Tensor, counts: Tensor) -> None:
        """Move row b's new entries ``paths[b]`` behind its text, of which ``counts[b]`` are valid.

        Args:
            paths: int64 [B, m], rising, as every root-to-node path in a parents-first tree is;
                what follows the first ``counts[b]`` is padding.
            counts: int64 [B].
        """
        assert self.buffer is not None
        source = self.lengths[:, None] + paths
        if self.num_rows == 1:  # one slice; several times faster than scattering
            end = self.length + paths.shape[1]
            self.buffer[..., self.length : end, :] = self.buffer.index_select(-2, source[0])
        else:
            target = self.lengths[:, None] + torch.arange(paths.shape[1], device=paths.device)
            moved = self.buffer[:, :, self._rows, :, source]
            self.buffer[:, :, self._rows, :, target] = moved
        self.lengths += counts

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows ``rows`` int64 [B']."""
        super().select(rows)
        self.lengths, self._rows = self.lengths[rows], self._rows[: rows.numel()]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new entries at each row's own place; return all columns in use."""
        if self.num_rows == 1:
            return super().write(layer, keys, values)
        assert self.buffer is not None, "rows are filled by prompts first"
        self.buffer[0, layer][self._rows, :, self._slots] = keys.transpose(1, 2)
        self.buffer[1, layer][self._rows, :, self._slots] = values.transpose(1, 2)
        end = self.length + keys.shape[2]
        return self.buffer[0, layer, :, :, :end], self.buffer[1, layer, :, :, :end]

    def memory_of(self, row: int, keys: Tensor) -> Tensor:
        """Return the part of the buffer that is row ``row``; ``keys`` tells the shapes."""
        if self.buffer is None:
            self.buffer = self._allocate(keys.expand(self.num_rows, -1, -1, -1))
        return self.buffer[:, :, row : row + 1]


class _Row(KVCache):
    """One row of a RaggedCache, as a cache of its own."""

    def __init__(self, owner: RaggedCache, index: int) -> None:
        super().__init__(owner.num_layers, owner.capacity)
        self.owner, self.index = owner, index

    def _allocate(self, keys: Tensor) -> Tensor:
        return self.owner.memory_of(self.index, keys)


def cache_argument(model_class: Any) -> str:
    """Return what this release of transformers calls the cache argument of ``forward``."""
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class _Layer(CacheLayerMixin):
    """One layer's window on the shared block, in the shape that transformers expects."""

    is_sliding = False

    def __init__(self, owner: KVCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Releases before 5 pass the query's positions, later ones their number.
        num_new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.owner.length + num_new, 0

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5


class _Adapter(Cache):
    def __init__(self, owner: KVCache, num_layers: int) -> None:
        super().__init__(layers=[_Layer(owner, index) for index in range(num_layers)])


def static_adapter(keys: list[Tensor], values: list[Tensor], slots: Tensor) -> Cache:
    """Return a cache of fixed shape, for tracing: every call writes at ``slots``, reads everything.

    Args:
        keys, values: one tensor [B, H, C, D] per layer, written in place.
        slots: int64 [n].
    """
    return _StaticAdapter(keys, values, slots)


class _StaticAdapter(Cache):
    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.slots = keys, values, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.keys[0].shape[2], 0
