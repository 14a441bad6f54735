"""Acceptance rules: which nodes of a verified tree stay, and which token follows them.

Pure functions of tensors. Legend: ``B`` rows (sequences), ``N`` nodes, ``C`` most children of a
node, ``K`` depth, ``V`` vocabulary. A rule sees the token of every node and the backbone's
distribution after it, and names one node per row: its path is emitted, then one more token.

Greedy acceptance and the two sampling rules are lossless: what they emit is distributed as the
backbone's own output. Typical acceptance is not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import DataError
from treeopt.tree import NO_CHILD, NO_PARENT, ROOT, Tree

ProbsAt = Callable[[Tensor], Tensor]
"""Returns the target distributions float32 [B, V] after one node per row, int64 [B]."""

_FEW = 128
_COLDEST = 1e-30  # greedy in effect; logits divided by less overflow float32


@dataclass(frozen=True)
class Greedy:
    """Emit the most probable token everywhere."""

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True


@dataclass(frozen=True)
class Sampling:
    """Emit what sampling from the backbone would emit.

    temperature: above 0.
    top_p: keep the smallest set of tokens with at least this mass, in (0, 1].
    top_k: keep this many tokens; 0 keeps all.
    candidates: ``top`` drafts each head's best tokens, ``sampled`` draws them from the head.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    candidates: str = "top"
    name: ClassVar[str] = "sampling"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.temperature, "temperature", 0, math.inf, "; 0 is the greedy rule")
        _check(self.top_p, "top_p", 0, 1)
        if type(self.top_k) is not int or self.top_k < 0:
            raise DataError(f"top_k is {self.top_k!r}; it must be a whole number, 0 to keep all")
        if self.candidates not in ("top", "sampled"):
            raise DataError(f"candidates is {self.candidates!r}; it must be top or sampled")


@dataclass(frozen=True)
class Typical:
    """Accept a token that is probable enough for the backbone's uncertainty; lossy.

    arXiv 2401.10774, section 2.3.1: p(token) > min(epsilon, delta * exp(-entropy)).
    """

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 0.7
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self.epsilon, "epsilon", 0, 1)
        _check(self.delta, "delta", 0, math.inf)
        _check(self.temperature, "temperature", 0, math.inf)


Rule = Greedy | Sampling | Typical
_RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Greedy, Sampling, Typical)}


def rule_from(section: Mapping[str, Any]) -> Rule:
    """Return the rule of a preset's ``decoding`` section, such as ``{"rule": "greedy"}``.

    Raises:
        DataError: an unknown rule or setting, or a value out of range.
    """
    settings = dict(section)
    name = settings.pop("rule", None)
    if not isinstance(name, str) or name not in _RULES:
        raise DataError(f"unknown decoding rule {name!r}; choose one of {', '.join(_RULES)}")
    known = [field.name for field in fields(_RULES[name])]
    for key in settings:
        if key not in known:
            allowed = ", ".join(known) or "no settings"
            raise DataError(f"the rule {name} has no setting {key!r}; it has {allowed}")
    return _RULES[name](**settings)


def section_of(rule: Rule) -> dict[str, Any]:
    """Return ``rule`` as a preset's ``decoding`` section."""
    return {"rule": rule.name, **asdict(rule)}


@dataclass(frozen=True)
class TreeShape:
    """What the rules need of a tree, as tensors on the decoder's device.

    parents int64 [N], the root its own. depths int64 [N]. ancestors bool [N, N], a node its own.
    children int64 [N, C], in order of rank, padded with -1.
    paths int64 [N, K + 1]: the nodes from the root to each node, padded with the node itself.
    is_root bool [N].
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    children: Tensor
    paths: Tensor
    is_root: Tensor

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeShape:
        """Return the shape of ``tree``."""
        most = max(1, int(tree.sibling_indices.max()) + 1)
        children = np.full((tree.tree_size, most), NO_CHILD)
        children[tree.parents[1:], tree.sibling_indices[1:]] = np.arange(1, tree.tree_size)
        paths = np.repeat(np.arange(tree.tree_size)[:, None], tree.depth + 1, axis=1)
        for node, mask in enumerate(tree.ancestor_mask):
            path = mask.nonzero()[0]
            paths[node, : len(path)] = path
        arrays = (
            np.maximum(tree.parents, ROOT),
            tree.depths,
            tree.ancestor_mask,
            children,
            paths,
            tree.parents == NO_PARENT,
        )
        return cls(*(torch.tensor(array, device=device) for array in arrays))


@dataclass(frozen=True)
class Accepted:
    """The deepest accepted node of each row, int64 [B], and the token after it, int64 [B]."""

    node: Tensor
    next_token: Tensor


def accept_matching(shape: TreeShape, tokens: Tensor, predicted: Tensor) -> Accepted:
    """Accept nodes that hold what was predicted at their parent: the greedy rule.

    Args:
        tokens: int64 [B, N].
        predicted: int64 [B, N], the token after each node.

    Right nodes form one chain, because siblings hold different tokens. Nodes are named by their
    parents, so there is no padding that could be accepted.
    """
    matches = (tokens == predicted[:, shape.parents]) | shape.is_root
    right = _with_ancestors(shape, matches)
    node = (right * (shape.depths + 1)).argmax(-1)
    return Accepted(node, _at(predicted, node))


def accept_drawn(shape: TreeShape, tokens: Tensor, probs_at: ProbsAt, uniforms: Tensor) -> Accepted:
    """Draw one token after each visited node; follow it while a child holds it. Lossless.

    Accepting each child with its probability and renormalising after a refusal is the same as one
    draw per node. The draw that no child holds is emitted: drawing again would count the refusal
    twice. (One draw per root-to-leaf path gives a shared node several chances, and is wrong.)

    Args:
        tokens: int64 [B, N], distinct among siblings.
        uniforms: float32 [B, K + 1] in [0, 1), one per depth.
    """
    node = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    drawn, walking = node, torch.ones_like(node, dtype=torch.bool)
    for depth in range(uniforms.shape[1]):
        drawn = torch.where(walking, draw(probs_at(node), uniforms[:, depth]), drawn)
        children = shape.children[node]
        matches = (children != NO_CHILD) & (
            tokens.gather(1, children.clamp(min=0)) == drawn[:, None]
        )
        walking = walking & matches.any(-1)
        node = torch.where(walking, _at(children, matches.int().argmax(-1)), node)
        if not walking.any():
            break
    return Accepted(node, drawn)


def accept_sampled(
    shape: TreeShape, tokens: Tensor, probs_at: ProbsAt, draft_probs: Tensor, uniforms: Tensor
) -> Accepted:
    """Accept candidates that were sampled without replacement, by recursive rejection. Lossless.

    Child after child: token x is accepted with probability min(1, p(x) / q(x)), where p is what is
    left of the target and q the draft distribution without the siblings refused so far. A refusal
    leaves p = norm(max(p - q, 0)). After the last one the next token is drawn from p. A token of
    q(x) = 0, which only fills a short list, is passed over: it tested nothing.

    Source: arXiv 2402.12374 (Sequoia), algorithm 2.

    Args:
        tokens: int64 [B, N]; a node's children in the order in which they were sampled.
        draft_probs: float32 [B, K, V], what nodes at depth 1, …, K were sampled from.
        uniforms: float32 [B, N + 1] in [0, 1): one per node, and one for the last draw.
    """
    node = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    walking = torch.ones_like(node, dtype=torch.bool)
    left = probs_at(node)
    for depth in range(draft_probs.shape[1]):
        children, draft = shape.children[node], draft_probs[:, depth]
        chosen = torch.full_like(node, NO_CHILD)
        for index in range(children.shape[1]):
            child = children[:, index]
            testing = walking & (chosen == NO_CHILD) & (child != NO_CHILD)
            if not testing.any():
                break  # children are padded behind, so no later one exists either
            token = _at(tokens, child.clamp(min=0))
            p, q = _at(left, token), _at(draft, token)
            takes = testing & (q > 0) & (_at(uniforms, child.clamp(min=0)) * q < p)
            chosen = torch.where(takes, child, chosen)
            refused = (testing & ~takes & (q > 0))[:, None]
            left = torch.where(refused, _normalised((left - draft).clamp(min=0), left), left)
            without = draft.scatter(1, token[:, None], 0)
            draft = torch.where(refused, _normalised(without, without), draft)
        walking = chosen != NO_CHILD
        if not walking.any():
            break
        node = torch.where(walking, chosen, node)
        left = torch.where(walking[:, None], probs_at(node), left)
    return Accepted(node, draw(left, uniforms[:, -1]))


def accept_typical(shape: TreeShape, tokens: Tensor, probs: Tensor, rule: Typical) -> Accepted:
    """Accept the longest path of typical tokens, the likelier one of two; lossy.

    Args:
        tokens: int64 [B, N].
        probs: float32 [B, N, V], the target distribution after each node, at the rule's
            temperature.
    """
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    bar = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)  # [B, N]
    parents = shape.parents
    given = probs[:, parents].gather(2, tokens[..., None])[..., 0]  # of each node's own token
    accepted = _with_ancestors(shape, (given > bar[:, parents]) | shape.is_root)
    log_probs = torch.where(shape.is_root, 0.0, given.log())  # the root was emitted before
    along = torch.where(shape.ancestors, log_probs[:, None], 0.0).sum(-1)
    # Depth first, then likelihood: added into one score, it would be lost in rounding.
    depths = torch.where(accepted, shape.depths, -1)
    longest = depths == depths.amax(-1, keepdim=True)
    node = torch.where(longest, along, -math.inf).argmax(-1)
    rows = torch.arange(len(tokens), device=tokens.device)
    return Accepted(node, probs[rows, node].argmax(-1))


def target_probs(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return the distribution that is sampled from: float32 [..., V].

    Temperature first, then the ``top_k`` best tokens and those equal to the last of them (0: all),
    then the smallest set with at least ``top_p`` of the mass, the smaller id first among equals.
    """
    scaled = logits.float() / max(temperature, _COLDEST)
    if top_k and top_k < scaled.shape[-1]:
        lowest = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < lowest, -math.inf)
    probs = scaled.softmax(-1)
    if top_p < 1:
        probs = probs.masked_fill(~_nucleus(probs, top_p), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return the smallest set with at least ``top_p`` of the mass, as a mask bool [..., V].

    It nearly always lies among the few best tokens, and sorting those alone is many times faster.
    """
    for count in (_FEW, probs.shape[-1]):
        values = probs.topk(min(count, probs.shape[-1]), dim=-1).values
        sums = values.cumsum(-1)
        if bool((sums[..., -1] >= top_p).all()):
            break
    kept = (sums - values < top_p).sum(-1, keepdim=True).clamp(min=1)  # by the mass before them
    lowest = values.gather(-1, kept - 1)
    above, equal = probs > lowest, probs == lowest
    room = kept - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return a token of each distribution by inverse CDF: int64 [B].

    Args:
        probs: float [B, V], rows of any positive sum.
        uniforms: [B] in [0, 1).

    The sums are float64, so that rounding at the end of a large vocabulary moves nothing; a token
    of probability 0 is never drawn.
    """
    sums = probs.double().cumsum(-1)
    wanted = uniforms.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)  # the last possible token
    return torch.minimum(found, last)


def sample_without_replacement(
    probs: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return ``count`` distinct tokens in the order in which they are drawn: int64 [..., count].

    The tokens of an exponential race: token x arrives at a time of rate ``probs[x]``. Where fewer
    tokens are possible, impossible ones fill the end.
    """
    times = torch.empty(probs.shape).exponential_(generator=generator).to(probs.device)
    return (probs / times.clamp(min=1e-30)).topk(count, dim=-1).indices


def _with_ancestors(shape: TreeShape, good: Tensor) -> Tensor:
    """Return which nodes are good [B, N] with all their ancestors."""
    return (good[:, None] | ~shape.ancestors).all(-1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[b, index[b]]`` for values [B, n] and index [B]."""
    return values.gather(1, index[:, None])[:, 0]


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return rows of ``weights`` divided by their sums; ``otherwise`` where rounding left none."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-38), otherwise)


def _check(value: Any, name: str, low: float, high: float, hint: str = "") -> None:
    """Raise DataError unless ``value`` is a finite number in (low, high]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low < value <= min(high, sys.float_info.max):
        above = f"above {low}" if math.isinf(high) else f"in ({low}, {high}]"
        raise DataError(f"{name} is {value!r}; it must be a number {above}{hint}")
