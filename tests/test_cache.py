"""The key-value cache: what a step keeps must equal what a fresh prefill would have written."""

from __future__ import annotations

import pytest
import torch
from tiny import PROMPTS, TREES, shared_backbone, shared_heads, tiny_backbone

from treeopt.decoder.plain import prefill
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import ModelError
from treeopt.models.cache import KVCache, RaggedCache


def filled(num_rows: int = 1, length: int = 6, capacity: int = 8) -> KVCache:
    """Return a cache of 2 layers, 1 head, size 1, whose column c of row b holds 10 b + c."""
    cache = KVCache(2, capacity)
    columns = torch.arange(length) + 10.0 * torch.arange(num_rows)[:, None]
    for layer in range(2):
        cache.write(layer, columns[:, None, :, None] + 100 * layer, -columns[:, None, :, None])
    cache.length = length
    return cache


def columns(cache: KVCache, row: int = 0, layer: int = 0) -> list[float]:
    """Return the valid keys of one row of one layer."""
    assert cache.buffer is not None
    return cache.buffer[0, layer, row, 0, : cache.length, 0].tolist()


def ragged(lengths: list[int], capacity: int = 9) -> RaggedCache:
    """Return a ragged cache of 2 layers, 1 head, size 1, whose column c of row b holds 10 b + c."""
    cache = RaggedCache(2, capacity, len(lengths), torch.device("cpu"))
    columns = torch.arange(capacity) + 10.0 * torch.arange(len(lengths))[:, None]
    keys = torch.stack([columns, columns + 100])[:, :, None, :, None]
    cache.buffer = torch.stack([keys, -keys])
    cache.lengths = torch.tensor(lengths)
    cache.length = max(lengths)
    return cache


def test_keep_moves_a_path_behind_the_text_and_forgets_the_rest():
    cache = ragged([2])
    cache.keep(torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    assert cache.lengths.tolist() == [5]
    assert cache.buffer[0, :, 0, 0, :5, 0].tolist() == [[0, 1, 2, 3, 5], [100, 101, 102, 103, 105]]
    assert cache.buffer[1, 0, 0, 0, :5, 0].tolist() == [0, -1, -2, -3, -5]


def test_keep_moves_every_rows_own_path():
    cache = ragged([2, 4, 1])
    cache.keep(torch.tensor([[0, 1, 3], [0, 3, 3], [0, 2, 4]]), torch.tensor([3, 2, 3]))
    assert cache.lengths.tolist() == [5, 6, 4]
    kept = [cache.buffer[0, 0, b, 0, :n, 0].tolist() for b, n in enumerate([5, 6, 4])]
    assert kept == [[0, 1, 2, 3, 5], [10, 11, 12, 13, 14, 17], [20, 21, 23, 25]]


def test_rows_write_at_their_own_places():
    cache = ragged([2, 4])
    new = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])[:, None, :, None]
    cache._slots = cache.lengths[:, None] + torch.arange(2)
    keys, _ = cache.write(1, new, new)
    assert keys.shape[2] == 6
    assert cache.buffer[0, 1, :, 0, :, 0].tolist() == [
        [100, 101, -1, -2, 104, 105, 106, 107, 108],
        [110, 111, 112, 113, -3, -4, 116, 117, 118],
    ]


def test_a_prompt_fills_its_row_and_no_other():
    backbone = shared_backbone()
    cache = backbone.new_ragged_cache(30, 3)
    with torch.inference_mode():
        prefill(backbone, cache.row(1), PROMPTS[0])
        fresh = backbone.new_cache(len(PROMPTS[0]))
        prefill(backbone, fresh, PROMPTS[0])
    assert torch.equal(cache.buffer[:, :, 1:2, :, : len(PROMPTS[0])], fresh.buffer)
    assert not cache.buffer[:, :, [0, 2]].any()


def test_select_keeps_batch_rows_in_the_given_order():
    cache = filled(num_rows=3, length=2)
    cache.select(torch.tensor([2, 0]))
    assert columns(cache, row=0) == [20, 21]
    assert columns(cache, row=1) == [0, 1]
    assert cache.length == 2


@pytest.mark.parametrize("name", ["chain", "star", "example", "gaps", "wide"])
def test_kept_path_equals_a_fresh_prefill_of_the_same_text(name):
    backbone, tree = shared_backbone(), TREES[name]
    decoder = TreeDecoder(backbone, shared_heads(), tree)
    prompt = PROMPTS[0]
    tokens = (torch.arange(tree.tree_size) * 7 + 3) % backbone.vocab_size
    for leaf in tree.leaves[:6]:
        rows = torch.from_numpy(tree.ancestor_mask[leaf]).nonzero()[:, 0]
        cache = decoder.new_batch(len(prompt) + 8, 1).cache
        with torch.inference_mode():
            prefill(backbone, cache.row(0), prompt)
            cache.set_length(0, len(prompt))
            cache.length = len(prompt)
            (states,), _ = decoder.verify(cache, tokens[None])
            assert cache.length == len(prompt)
            cache.keep(rows[None], torch.tensor([len(rows)]))
            fresh = backbone.new_cache(len(prompt) + len(rows))
            ids = torch.tensor([prompt + tokens[rows].tolist()])
            expected = backbone.forward(ids, fresh)[0, len(prompt) :]
        assert cache.lengths.tolist() == [fresh.length] == [len(prompt) + len(rows)]
        torch.testing.assert_close(
            cache.buffer[..., : fresh.length, :], fresh.buffer, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(states[rows], expected, rtol=1e-4, atol=1e-4)


def test_tree_rows_are_placed_by_depth_and_siblings_share_a_place(monkeypatch):
    backbone = tiny_backbone()
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    cache = decoder.new_batch(20, 1).cache
    seen: list[list[list[int]]] = []
    backbone.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    with torch.inference_mode():
        backbone.forward(torch.tensor([[5, 6, 7, 8]]), cache.row(0), torch.arange(4)[None])
        cache.set_length(0, 4)
        cache.length = 4
        decoder.verify(cache, torch.arange(6)[None])
        cache.keep(torch.tensor([[0, 1]]), torch.tensor([2]))
        cache.length = 6
        decoder.verify(cache, torch.arange(6)[None])
    assert seen == [[[0, 1, 2, 3]], [[4, 5, 5, 6, 6, 7]], [[6, 7, 7, 8, 8, 9]]]


def test_order_of_siblings_does_not_matter():
    backbone = shared_backbone()
    decoder = TreeDecoder(backbone, shared_heads(), TREES["star"])
    cache = decoder.new_batch(20, 1).cache
    tokens = torch.tensor([9, 11, 12, 13, 14, 15, 16, 17])
    order = torch.tensor([0, 7, 3, 1, 5, 2, 6, 4])
    with torch.inference_mode():
        prefill(backbone, cache.row(0), PROMPTS[1])
        cache.set_length(0, len(PROMPTS[1]))
        cache.length = len(PROMPTS[1])
        (states,), _ = decoder.verify(cache, tokens[None])
        (shuffled,), _ = decoder.verify(cache, tokens[None, order])
    torch.testing.assert_close(shuffled, states[order], rtol=1e-4, atol=1e-4)


def test_capacity_is_refused_before_anything_is_written():
    backbone = shared_backbone()
    cache = backbone.new_cache(5)
    with torch.inference_mode():
        backbone.forward(torch.tensor([[1, 2, 3]]), cache)
        before = cache.buffer.clone()
        with pytest.raises(ModelError, match=r"^3 \+ 3 tokens do not fit a cache of 5$"):
            backbone.forward(torch.tensor([[4, 5, 6]]), cache)
        assert cache.length == 3
        assert torch.equal(cache.buffer, before)
        backbone.forward(torch.tensor([[4, 5]]), cache)
    assert cache.length == cache.capacity


def test_reset_leaves_nothing_of_the_text_before():
    backbone, prompt = shared_backbone(), PROMPTS[2]
    cache = backbone.new_cache(40)
    with torch.inference_mode():
        backbone.forward(torch.tensor([PROMPTS[0]]), cache)
        memory = cache.buffer.data_ptr()
        cache.reset()
        assert cache.length == 0
        reused = backbone.forward(torch.tensor([prompt]), cache)
        fresh = backbone.forward(torch.tensor([prompt]), backbone.new_cache(40))
    assert cache.buffer.data_ptr() == memory
    assert torch.equal(reused, fresh)


def test_token_by_token_equals_one_call():
    backbone, prompt = shared_backbone(), PROMPTS[3]
    whole, stepwise = backbone.new_cache(len(prompt)), backbone.new_cache(len(prompt))
    with torch.inference_mode():
        backbone.forward(torch.tensor([prompt]), whole)
        for token in prompt:
            backbone.forward(torch.tensor([[token]]), stepwise)
    torch.testing.assert_close(stepwise.buffer, whole.buffer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "values"),
    [((1, 2, 1, 4), (1, 2, 1, 4)), ((1, 1, 1, 6), (1, 1, 1, 6)), ((1, 1, 1, 4), (1, 1, 1, 2))],
    ids=["heads", "head size", "values unlike keys"],
)
def test_layers_of_unlike_shape_are_refused(keys, values):
    cache = KVCache(2, 8)
    cache.write(0, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    with pytest.raises(ModelError, match="unlike key-value shapes"):
        cache.write(1, torch.zeros(keys), torch.zeros(values))
