"""The candidate list against a slow, obviously right sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treeopt.models.candidates import cache_rows, log_total, top_candidates


def sorted_by_hand(logits: Tensor, num_ranks: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the best tokens by (logit falling, id rising)."""
    values, ids = [], []
    for row in logits.tolist():
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:num_ranks]
        values.append([row[token] for token in order])
        ids.append(order)
    return values, ids


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "num_ranks"),
    [
        (1, 40, 1),
        (3, 61, 61),  # the whole vocabulary
        (1, 128, 2),  # as many groups as ranks
        (2, 129, 1),  # a tail of one
        (5, 1000, 10),  # 15 groups and a tail
        (5, 1000, 15),  # R = groups
        (5, 1000, 16),  # R > groups
        (4, 1024, 10),  # no tail
        (64, 2085, 32),
    ],
)
def test_equals_a_stable_sort(rows, vocab, num_ranks, dtype):
    logits = random_logits(rows, vocab, dtype)
    values, ids = top_candidates(logits, num_ranks)
    expected_values, expected_ids = sorted_by_hand(logits, num_ranks)
    assert ids.tolist() == expected_ids
    assert values.tolist() == expected_values
    assert values.dtype == dtype
    assert ids.dtype == torch.int64


def test_equal_logits_go_by_token_id_across_groups():
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    logits[0, [999, 500, 70]] = 1.0
    logits[1, 64:128] = 1.0
    _, ids = top_candidates(logits, 5)
    assert ids.tolist() == [[70, 500, 999, 0, 1], [64, 65, 66, 67, 68]]


def test_many_ties_of_bfloat16():
    logits = (random_logits(8, 1000, torch.float32) / 4).round().to(torch.bfloat16)
    assert len(logits.unique()) < 10
    assert top_candidates(logits, 12)[1].tolist() == sorted_by_hand(logits, 12)[1]


def test_negative_zero_equals_zero():
    logits = torch.full((1, 640), -1.0)
    logits[0, [3, 200]] = -0.0
    logits[0, [5, 300]] = 0.0
    assert top_candidates(logits, 4)[1].tolist() == [[3, 5, 200, 300]]
    assert top_candidates(logits[:, :301], 4)[1].tolist() == [[3, 5, 200, 300]]


def test_negative_and_infinite_logits_keep_their_order():
    logits = torch.full((1, 640), float("-inf"))
    logits[0, [600, 9, 130, 131]] = torch.tensor([-3.5, -1e30, float("inf"), -1e-30])
    assert top_candidates(logits, 6)[1].tolist() == [[130, 131, 600, 9, 0, 1]]


def test_one_row_at_a_time_gives_the_same_lists():
    logits = random_logits(7, 777, torch.bfloat16, seed=3)
    together = top_candidates(logits, 9)[1]
    alone = torch.cat([top_candidates(row[None], 9)[1] for row in logits])
    assert torch.equal(together, alone)


def test_rows_need_not_be_contiguous():
    logits = random_logits(9, 700, torch.float32)[::2]
    assert top_candidates(logits, 5)[1].tolist() == sorted_by_hand(logits, 5)[1]


def test_logits_are_left_as_they_are():
    logits = random_logits(3, 300, torch.float32)
    before = logits.clone()
    top_candidates(logits, 4)
    log_total(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_log_total_is_logsumexp(rows):
    logits = random_logits(rows, 5003, torch.bfloat16)
    assert rows == 1 or rows % cache_rows(logits) != 0 or rows < cache_rows(logits)
    expected = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    torch.testing.assert_close(log_total(logits), expected)


def test_cache_rows_is_at_least_one_and_falls_with_the_vocabulary():
    assert cache_rows(torch.empty(4, 1 << 24, device="meta").to("meta")) >= 1
    assert cache_rows(torch.zeros(1, 1 << 20)) == 1
    assert cache_rows(torch.zeros(1, 1 << 10)) > cache_rows(torch.zeros(1, 1 << 12)) > 1
