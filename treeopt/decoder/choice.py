"""Which nodes of a universe a step verifies: all of a static tree, the likeliest of a dynamic one.

Legend: ``B`` rows (sequences), ``U`` nodes of the universe, ``N`` tree size, ``K`` depth, ``R``
ranks, ``V`` vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.dynamic import ONE, DynamicTree
from treeopt.models.candidates import log_total

NO_TOKEN = -1  # held by nodes that are not verified; equal to nothing that is predicted or drawn


@dataclass(frozen=True)
class Choice:
    """The nodes that each row verifies, in the order in which they stand in the call.

    nodes: int64 [B, N], rising, so that parents come first.
    places: int64 [B, U]: where each node of the universe stands among them; 0 for the others.

    B is 1 where all rows verify the same nodes.
    """

    nodes: Tensor
    places: Tensor

    @classmethod
    def of(cls, nodes: Tensor, universe_size: int) -> Choice:
        """Return the choice of ``nodes`` [B, N]."""
        places = torch.zeros((len(nodes), universe_size), dtype=torch.int64, device=nodes.device)
        standing = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        return cls(nodes, places.scatter_(1, nodes, standing))

    def place_of(self, nodes: Tensor) -> Tensor:
        """Return where ``nodes`` [B, m] stand in the call: int64 [B, m]."""
        return self.places.expand(len(nodes), -1).gather(1, nodes)

    def spread(self, values: Tensor) -> Tensor:
        """Return ``values`` [B, N] by node: [B, U], anything at nodes that were not chosen."""
        return values.gather(1, self.places.expand(len(values), -1))

    def without_others(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` [B, U] with ``NO_TOKEN`` at the nodes that were not chosen."""
        kept = torch.full_like(tokens, NO_TOKEN)
        return kept.scatter_(1, self.nodes, tokens.gather(1, self.nodes))


class Chooser:
    """A dynamic tree's choice, on the decoder's device: the same nodes as ``DynamicTree.chosen``.

    Tables, products and a stable sort: nothing depends on the device's arithmetic.
    """

    def __init__(self, tree: DynamicTree, device: torch.device) -> None:
        self.tree = tree
        self._table = torch.tensor(tree.table, device=device)
        self._starts = torch.tensor(tree.starts, device=device)
        self._levels = [(first, torch.tensor(slots, device=device)) for first, slots in tree.levels]

    def choose(self, logits: Tensor, best: Tensor) -> Choice:
        """Return the likeliest nodes of each row.

        Args:
            logits: [B * K, V], of the heads.
            best: [B * K, R], the largest of them.
        """
        probs = (best.float() - log_total(logits)).exp().half()  # rounded as a trace keeps them
        bits = probs.view(torch.int16).clamp(0, ONE).view(-1, *self._starts.shape)
        chances = self._table[self._starts + bits].flatten(1)  # [B, K * R]
        weights = chances.new_ones((len(chances), self.tree.universe.tree_size))
        for first, slots in self._levels:
            weights[:, first:] *= chances[:, slots]
        order = weights.argsort(dim=1, descending=True, stable=True)
        nodes = order[:, : self.tree.tree_size].sort(dim=1).values
        return Choice.of(nodes, weights.shape[1])
