"""Acceptance rules against pictures, plain loops, and the distribution they promise to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TREES
from torch import Tensor

from treeopt.decoder.rules import (
    Accepted,
    Greedy,
    Sampling,
    TreeShape,
    Typical,
    accept_drawn,
    accept_matching,
    accept_sampled,
    accept_typical,
    draw,
    rule_from,
    sample_without_replacement,
    section_of,
    target_probs,
)
from treeopt.errors import DataError
from treeopt.tree import Path, Tree

CPU = torch.device("cpu")

# root ─┬─ 1 (0,) ─┬─ 3 (0, 0) ─── 5 (0, 0, 0)
#       │          └─ 4 (0, 1)
#       └─ 2 (1,)
EXAMPLE = TREES["example"]
TOKENS = torch.tensor([[5, 1, 2, 3, 4, 6]])


def shape_of(tree: Tree) -> TreeShape:
    return TreeShape.of(tree, CPU)


def after(rows: Sequence[Sequence[float]]) -> Callable[[Tensor], Tensor]:
    """Return distributions by node, the same for every batch row."""
    table = torch.tensor(rows)
    return lambda nodes: table[nodes]


def test_shape_picture():
    shape = shape_of(EXAMPLE)
    assert shape.parents.tolist() == [0, 0, 0, 1, 1, 3]
    assert shape.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert shape.children.tolist() == [[1, 2], [3, 4], [-1, -1], [5, -1], [-1, -1], [-1, -1]]
    assert shape.paths.tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 2, 2, 2],
        [0, 1, 3, 3],
        [0, 1, 4, 4],
        [0, 1, 3, 5],
    ]
    assert shape_of(TREES["root only"]).children.tolist() == [[-1]]


def test_children_of_a_tree_with_gaps_lie_in_order_of_rank():
    shape = shape_of(TREES["gaps"])
    paths = TREES["gaps"].paths
    for node, children in enumerate(shape.children.tolist()):
        found = [paths[child] for child in children if child >= 0]
        assert found == sorted(p for p in paths if p and p[:-1] == paths[node])


# Greedy


@pytest.mark.parametrize(
    ("tokens", "predicted", "node"),
    [
        ([5, 1, 2, 3, 4, 6], [9, 3, 0, 6, 0, 0], 0),  # nothing right
        ([5, 1, 2, 3, 4, 6], [9, 3, 9, 6, 9, 9], 0),  # a grandchild right, its parent not
        ([5, 1, 2, 3, 4, 6], [1, 3, 9, 6, 9, 9], 5),  # right to the deepest leaf
        ([5, 1, 2, 3, 4, 6], [1, 4, 9, 6, 9, 9], 4),  # to the other leaf of node 1
        ([5, 1, 2, 3, 4, 6], [2, 3, 9, 6, 9, 9], 2),  # to the leaf beside it
        ([5, 1, 2, 3, 4, 6], [1, 9, 9, 6, 9, 9], 1),  # broken in the middle
        ([0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], 5),  # token 0 everywhere
        ([9, 5, 6, 7, 8, 4], [6, 0, 0, 0, 0, 0], 2),  # a short leaf, then 0 is wanted for ever
    ],
)
def test_matching_by_hand(tokens, predicted, node):
    rows = torch.tensor([tokens, tokens]), torch.tensor([predicted, predicted])
    accepted = accept_matching(shape_of(EXAMPLE), *rows)
    assert accepted.node.tolist() == [node] * 2
    assert accepted.next_token.tolist() == [predicted[node]] * 2


def paths_strategy() -> st.SearchStrategy[list[Path]]:
    """Trees of up to 12 nodes: every drawn path with its prefixes."""
    path = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    return st.lists(path, max_size=6).map(
        lambda paths: sorted({p[:n] for p in paths for n in range(1, len(p) + 1)})
    )


def by_hand(tree: Tree, good: Callable[[int, int], bool]) -> list[int]:
    """Return the nodes that are good for their parents all the way, by walking."""
    kept = [0]
    for node in range(1, tree.tree_size):
        parent = int(tree.parents[node])
        if parent in kept and good(parent, node):
            kept.append(node)
    return kept


@settings(max_examples=80, deadline=None)
@given(paths_strategy(), st.integers(0, 2**30))
def test_matching_equals_walking(paths, seed):
    tree, generator = Tree.from_paths(paths), torch.Generator().manual_seed(seed)
    tokens = torch.tensor([max(rank, 0) for rank in tree.ranks.tolist()])  # siblings differ
    predicted = torch.randint(3, (tree.tree_size,), generator=generator)
    kept = by_hand(tree, lambda parent, node: tokens[node] == predicted[parent])
    accepted = accept_matching(shape_of(tree), tokens[None], predicted[None])
    assert int(accepted.node) == max(kept, key=lambda node: tree.depths[node])


# Typical


def test_typical_by_hand():
    even, sure = [0.25] * 4 + [0.0] * 3, [0.01, 0.9, 0.06, 0.03, 0, 0, 0]
    entropy = -sum(p * math.log(p) for p in sure if p)
    assert math.exp(-entropy) > 0.3  # in natural log: 0.42 nats; 0.6 bits would give 0.55
    rows = [sure, even, even, even, even, even]
    probs = torch.tensor([rows])
    # after the root: 0.9 passes, 0.06 fails min(0.09, 0.3 * 0.66); after node 1: 0.25 passes
    # min(0.09, 0.3 / 4 = 0.075), token 4 has nothing
    tokens = torch.tensor([[6, 1, 2, 3, 4, 0]])
    accepted = accept_typical(shape_of(EXAMPLE), tokens, probs, Typical(0.09, 0.3))
    assert accepted.node.tolist() == [5]
    assert accepted.next_token.tolist() == [0]  # the first of the likeliest
    lower = accept_typical(shape_of(EXAMPLE), torch.tensor([[6, 2, 1, 3, 4, 0]]), probs, Typical())
    assert lower.node.tolist() == [2]
    lax = Typical(0.05, 0.3)
    tokens = torch.tensor([[6, 2, 1, 3, 4, 0]])
    assert accept_typical(shape_of(EXAMPLE), tokens, probs, lax).node.tolist() == [5]


def test_a_token_at_the_bar_is_not_typical():
    tree, probs = Tree.from_paths([(0,)]), torch.full((1, 2, 4), 0.25)
    tokens = torch.tensor([[0, 1]])
    for epsilon, node in ((0.25, 0), (0.2499, 1)):
        accepted = accept_typical(shape_of(tree), tokens, probs, Typical(epsilon, delta=2))
        assert accepted.node.tolist() == [node]


def test_of_two_typical_paths_the_likelier_wins():
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    probs = torch.tensor([[[0.4, 0.6, 0], [0.9, 0.1, 0], [0.5, 0.5, 0], [1, 0, 0], [0, 1, 0]]])
    tokens = torch.tensor([[2, 0, 1, 0, 0]])  # 0.4 * 0.9 = 0.36 against 0.6 * 0.5 = 0.3
    accepted = accept_typical(shape_of(tree), tokens, probs, Typical(0.09, 0.3))
    assert (accepted.node.tolist(), accepted.next_token.tolist()) == ([3], [0])


def test_the_likelier_of_two_unlikely_paths_wins():
    """Three nodes at p = 1e-3 each: a sum of depth and likelihood would round them equal."""
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)])
    probs = torch.full((1, tree.tree_size, 2000), (1 - 0.0016) / 1998)
    probs[..., 0], probs[..., 1] = 0.0006, 0.001  # above 0.3 * exp(-entropy) = 0.3 / 2000
    tokens = torch.tensor([[0, *(path[0] for path in tree.paths[1:])]])
    accepted = accept_typical(shape_of(tree), tokens, probs, Typical(0.09, 0.3))
    assert accepted.node.tolist() == [tree.paths.index((1, 0, 0))]


@settings(max_examples=60, deadline=None)
@given(paths_strategy(), st.integers(0, 2**30))
def test_typical_equals_walking(paths, seed):
    tree, generator = Tree.from_paths(paths), torch.Generator().manual_seed(seed)
    rule = Typical(0.2, 0.5)
    tokens = [max(rank, 0) for rank in tree.ranks.tolist()]
    logits = 2 * torch.randn(tree.tree_size, 5, generator=generator)
    probs = logits.softmax(-1)

    def good(parent: int, node: int) -> bool:
        row = probs[parent]
        entropy = -float((row * row.log()).sum())
        return float(row[tokens[node]]) > min(rule.epsilon, rule.delta * math.exp(-entropy))

    def score(node: int) -> tuple[int, float]:
        along = tree.ancestor_mask[node].nonzero()[0][1:]
        return int(tree.depths[node]), sum(
            math.log(float(probs[int(tree.parents[n])][tokens[n]])) for n in along
        )

    best = max(by_hand(tree, good), key=score)
    accepted = accept_typical(shape_of(tree), torch.tensor([tokens]), probs[None], rule)
    assert int(accepted.node) == best
    assert int(accepted.next_token) == int(probs[best].argmax())


# Sampling, by hand


def test_a_draw_that_no_child_holds_is_emitted():
    shape = shape_of(EXAMPLE)
    probs_at = after([[0, 0.5, 0.25, 0, 0, 0, 0.25]] + [[0, 0, 0, 1, 0, 0, 0]] * 5)
    uniforms = torch.tensor([[0.9, 0.1, 0.1, 0.1], [0.1, 0.5, 0.7, 0], [0.6, 0.5, 0.0, 0]])
    accepted = accept_drawn(shape, TOKENS.expand(3, -1), probs_at, uniforms)
    # 0.9 draws token 6, which no child of the root holds; 0.1 draws 1, then 3, then 3 again;
    # 0.6 draws 2, a leaf, then 3
    assert accepted.node.tolist() == [0, 3, 2]
    assert accepted.next_token.tolist() == [6, 3, 3]


def test_sampled_candidates_by_hand():
    shape = shape_of(TREES["star"])
    target, draft = [0.2, 0.3, 0.5], torch.tensor([[[0.6, 0.3, 0.1]]])
    tokens = torch.tensor([[9, 0, 1, 2, 0, 0, 0, 0]])

    def accepted(*tests: float, last: float = 0.0) -> tuple[int, int]:
        uniforms = torch.tensor([[0.0, *tests, *[0.0] * (7 - len(tests)), last]])
        found = accept_sampled(shape, tokens, after([target] * 8), draft, uniforms)
        return int(found.node), int(found.next_token)

    assert accepted(0.3)[0] == 1  # p/q = 1/3
    # refused: p = norm(0, 0, 0.4), q = norm(0, 0.3, 0.1); token 1 has no mass left, token 2 has
    # 1 / 0.25 > 1
    assert accepted(0.34, 0.0)[0] == 3
    assert accepted(0.34, 0.0, 0.99)[0] == 3
    assert accepted(0.3, last=0.45) == (1, 1)  # the draw after node 1: 0.2 < 0.45 < 0.5


@pytest.mark.parametrize("seed", range(5))
def test_equal_distributions_are_always_accepted(seed):
    probs = torch.rand(1, 6, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    tokens = torch.tensor([[0, 4, 1, 2, 3, 0, 5, 2]])
    uniforms = torch.full((1, 9), 1 - 2**-24)
    star = shape_of(TREES["star"])
    accepted = accept_sampled(star, tokens, after([probs[0].tolist()] * 8), probs[None], uniforms)
    assert accepted.node.tolist() == [1]


def test_an_empty_residual_keeps_the_target():
    pair = shape_of(Tree.from_paths([(0,), (1,)]))
    draft = torch.tensor([[[0.9, 0.5]]])  # rounding, exaggerated: q >= p everywhere
    uniforms = torch.tensor([[0.0, 0.99, 0.99, 0.4], [0.0, 0.99, 0.99, 0.6]])
    tokens = torch.tensor([[9, 0, 0]]).expand(2, -1)  # refused, then not to be had again
    accepted = accept_sampled(
        pair, tokens, after([[0.5, 0.5]] * 3), draft.expand(2, -1, -1), uniforms
    )
    assert (accepted.node.tolist(), accepted.next_token.tolist()) == ([0, 0], [0, 1])


@pytest.mark.parametrize(("last", "token"), [(0.1, 0), (0.4, 1), (0.9, 2)])
def test_candidates_that_the_draft_cannot_draw_change_nothing(last, token):
    star = shape_of(TREES["star"])
    tokens = torch.tensor([[9, 1, 2, 3, 1, 2, 3, 1]])
    uniforms = torch.tensor([[0.0] * 8 + [last]])
    certain = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    probs_at = after([[0.25, 0.25, 0.5, 0.0]] * 8)
    accepted = accept_sampled(star, tokens, probs_at, certain, uniforms)
    assert (accepted.node.tolist(), accepted.next_token.tolist()) == ([0], [token])


# Sampling, by its distribution

ROWS, VOCAB = 120_000, 6
GENERATOR = torch.Generator().manual_seed(5)
FIRST = torch.rand(VOCAB, generator=GENERATOR).mul(2).softmax(-1)
SECOND = torch.rand(VOCAB, VOCAB, generator=GENERATOR).mul(3).softmax(-1)
DRAFT = torch.rand(2, VOCAB, generator=GENERATOR).mul(2).softmax(-1)
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])


@pytest.fixture(autouse=True)
def _same_draws_in_every_order():
    GENERATOR.manual_seed(11)


def emitted(tokens: Tensor, accepted: Accepted) -> Tensor:
    """Return the first two emitted tokens of each row, int64 [B, 2]; a missing one is drawn."""
    shape = shape_of(TREE)
    path = tokens.gather(1, shape.paths[accepted.node])[:, 1:]
    depth = shape.depths[accepted.node]
    first = torch.where(depth >= 1, path[:, 0], accepted.next_token)
    later = draw(SECOND[first], torch.rand(len(first), generator=GENERATOR))
    second = torch.where(depth >= 2, path[:, 1], accepted.next_token)
    return torch.stack([first, torch.where(depth == 0, later, second)], dim=1)


def p_value(pairs: Tensor) -> float:
    """Return the chi-square test's p-value of pairs against the exact joint distribution."""
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    expected = (FIRST[:, None] * SECOND).flatten().double() * len(pairs)
    assert expected.min() > 20
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((VOCAB**2 - 1) / 2).double(), statistic / 2))


def probs_after(tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the toy target: FIRST after the root, SECOND after a node at depth 1, then even."""
    rows, depths = torch.arange(len(tokens)), shape_of(TREE).depths

    def probs_at(nodes: Tensor) -> Tensor:
        deep = torch.full((len(tokens), VOCAB), 1 / VOCAB)
        one = torch.where((depths[nodes] == 1)[:, None], SECOND[tokens[rows, nodes]], deep)
        return torch.where((depths[nodes] == 0)[:, None], FIRST, one)

    return probs_at


def top_candidates() -> Tensor:
    order = DRAFT.argsort(-1, descending=True)
    nodes = [0] + [int(order[len(path) - 1, path[-1]]) for path in TREE.paths[1:]]
    return torch.tensor(nodes).expand(ROWS, -1)


def test_deterministic_candidates_keep_the_distribution():
    tokens = top_candidates()
    uniforms = torch.rand(ROWS, 3, generator=GENERATOR)
    accepted = accept_drawn(shape_of(TREE), tokens, probs_after(tokens), uniforms)
    assert {0, 1, 2} <= set(shape_of(TREE).depths[accepted.node].tolist())
    assert p_value(emitted(tokens, accepted)) > 1e-3


def test_sampled_candidates_keep_the_distribution():
    lists = sample_without_replacement(DRAFT.expand(ROWS, -1, -1), 3, GENERATOR)
    pairs = list(zip(TREE.paths, TREE.sibling_indices.tolist(), strict=True))
    slots = torch.tensor([(len(path) - 1) * 3 + index for path, index in pairs[1:]])
    tokens = torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), lists.flatten(1)[:, slots]], dim=1)
    uniforms = torch.rand(ROWS, TREE.tree_size + 1, generator=GENERATOR)
    accepted = accept_sampled(
        shape_of(TREE), tokens, probs_after(tokens), DRAFT.expand(ROWS, -1, -1), uniforms
    )
    assert {0, 1, 2} <= set(shape_of(TREE).depths[accepted.node].tolist())
    assert p_value(emitted(tokens, accepted)) > 1e-3


def test_one_draw_per_path_is_caught():
    """Medusa's nucleus mode: every root-to-leaf path draws for itself, the longest wins."""
    tokens, shape = top_candidates(), shape_of(TREE)
    probs_at = probs_after(tokens)
    best = Accepted(torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64))
    leaves = TREE.leaves.tolist()
    for leaf in leaves:
        alone = shape.paths[leaf]
        chain = Tree.from_paths([(0,) * d for d in range(1, int(shape.depths[leaf]) + 1)])
        nodes = alone[: chain.tree_size]
        uniforms = torch.rand(ROWS, 3, generator=GENERATOR)
        found = accept_drawn(
            shape_of(chain), tokens[:, nodes], lambda n, nodes=nodes: probs_at(nodes[n]), uniforms
        )
        deeper = (shape.depths[nodes[found.node]] > shape.depths[best.node]) | torch.tensor(
            leaf == leaves[0]
        )
        best = Accepted(
            torch.where(deeper, nodes[found.node], best.node),
            torch.where(deeper, found.next_token, best.next_token),
        )
    assert p_value(emitted(tokens, best)) < 1e-6


def test_drawing_again_after_a_refusal_is_caught():
    tokens = top_candidates()
    probs_at = probs_after(tokens)
    uniforms = torch.rand(ROWS, 3, generator=GENERATOR)
    accepted = accept_drawn(shape_of(TREE), tokens, probs_at, uniforms)
    again = draw(probs_at(accepted.node), torch.rand(ROWS, generator=GENERATOR))
    assert p_value(emitted(tokens, Accepted(accepted.node, again))) < 1e-6


# Distributions and draws


def test_target_probs_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    expect = torch.testing.assert_close
    expect(target_probs(logits, 1.0, 1.0, 0), torch.tensor([0.5, 0.25, 0.125, 0.125]))
    expect(target_probs(logits, 0.5, 1.0, 0), torch.tensor([16, 4, 1, 1]) / 22)
    expect(target_probs(logits, 1.0, 1.0, 2), torch.tensor([2, 1, 0, 0]) / 3)
    expect(target_probs(logits, 1.0, 0.5, 0), torch.tensor([1.0, 0, 0, 0]))
    expect(target_probs(logits, 1.0, 0.51, 0), torch.tensor([2, 1, 0, 0]) / 3)
    expect(target_probs(logits, 1.0, 0.8, 0), torch.tensor([4, 2, 1, 0]) / 7)  # smaller id first
    for top_p in (1e-9, 1e-50):  # 1e-50 is 0 in float32
        expect(target_probs(logits, 1.0, top_p, 0), torch.tensor([1.0, 0, 0, 0]))
    expect(target_probs(logits, 1.0, 0.7, 2), torch.tensor([2, 1, 0, 0]) / 3)
    masked = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    expect(target_probs(masked, 1.0, 0.9, 3), torch.tensor([0.5, 0, 0.5, 0]))
    for temperature in (1e-3, 1e-40, 5e-324):  # float32 would overflow
        expect(target_probs(logits, temperature, 0.9, 2), torch.tensor([1.0, 0, 0, 0]))


@pytest.mark.parametrize("spread", [0.0, 0.02, 3.0])  # 0: all equal, and far more than 128 kept
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_equals_a_full_sort(spread, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(3, 400, generator=generator)).mul(8).round() / 8  # with ties
    probs = logits.softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    expected = probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(target_probs(logits, 1.0, top_p, 0), expected)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (1 - 2**-24, 3), (1.0, 3)]
)
def test_draw_never_returns_the_impossible(uniform, token):
    probs = torch.tensor([[0, 0.25, 0, 0.75, 0, 0]])
    assert draw(probs, torch.tensor([uniform])).tolist() == [token]
    assert draw(7 * probs, torch.tensor([uniform])).tolist() == [token]


def test_sampling_without_replacement_follows_the_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    drawn = sample_without_replacement(probs.expand(60_000, -1), 4, GENERATOR)
    assert (drawn.sort(-1).values == torch.arange(4)).all()
    assert (drawn[:, 3] == 3).all()  # the impossible one comes last
    assert (drawn[:, 0] == 0).float().mean() == pytest.approx(0.5, abs=0.01)
    second = drawn[drawn[:, 0] == 0][:, 1]
    assert (second == 1).float().mean() == pytest.approx(0.6, abs=0.012)  # 0.3 / (0.3 + 0.2)


# Values


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Sampling(0.0),
            r"temperature is 0.0; it must be a number above 0; 0 is the greedy",
        ),
        (lambda: Sampling(-1), "temperature is -1; it must be a number above 0"),
        (lambda: Sampling(math.nan), "temperature is nan"),
        (lambda: Sampling(math.inf), "temperature is inf"),
        (lambda: Sampling(10**400), "temperature is 1000"),
        (lambda: Sampling(True), "temperature is True"),
        (lambda: Sampling(top_p=0), r"top_p is 0; it must be a number in \(0, 1\]"),
        (lambda: Sampling(top_p=1.2), r"top_p is 1.2; it must be a number in \(0, 1\]"),
        (lambda: Sampling(top_k=-1), "top_k is -1; it must be a whole number"),
        (lambda: Sampling(top_k=2.5), "top_k is 2.5; it must be a whole number"),
        (lambda: Sampling(candidates="best"), "candidates is 'best'; it must be top or sampled"),
        (lambda: Typical(epsilon=2), r"epsilon is 2; it must be a number in \(0, 1\]"),
        (lambda: Typical(delta=0), "delta is 0; it must be a number above 0"),
        (lambda: rule_from({"rule": "nucleus"}), "unknown decoding rule 'nucleus'; choose one of"),
        (lambda: rule_from({}), "unknown decoding rule None"),
        (lambda: rule_from({"rule": ["greedy"]}), r"unknown decoding rule \['greedy'\]"),
        (lambda: rule_from({"rule": "greedy", "top_p": 1}), "greedy has no setting 'top_p'"),
        (lambda: rule_from({"rule": "typical", "top_p": 1}), "it has epsilon, delta, temperature"),
    ],
)
def test_values_that_cannot_be(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize("rule", [Greedy(), Sampling(0.7, 0.9, 40, "sampled"), Typical(0.1, 0.2)])
def test_rules_and_preset_sections_are_the_same(rule):
    assert rule_from(section_of(rule)) == rule
    assert rule.lossless == (rule.name != "typical")
