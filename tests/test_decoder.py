"""Tree decoding must be plain decoding, token for token, for every tree, model and ending."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny import (
    CONTEXT,
    PROMPTS,
    TREES,
    VOCAB,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    train_briefly,
    tree_answer,
    with_eos,
)
from torch import Tensor

from treeopt.decoder.plain import answer_batch, decode_plain, like_length, room_for
from treeopt.decoder.stream import TextStream
from treeopt.decoder.tree import PHASES, Batch, StepLog, TreeDecoder
from treeopt.errors import DataError, TreeError
from treeopt.formats.heads import OWN
from treeopt.models.backbone import Backbone, check_rows
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

# root ─┬─ 1 (0,) ─┬─ 3 (0, 0) ─── 5 (0, 0, 0)
#       │          └─ 4 (0, 1)
#       └─ 2 (1,)
EXAMPLE = TREES["example"]


@cache
def plain_answers(num_prompts: int, max_new_tokens: int) -> list[list[int]]:
    """Return the shared backbone's plain answers to the first prompts."""
    return [plain_answer(shared_backbone(), p, max_new_tokens) for p in PROMPTS[:num_prompts]]


# Equality


@pytest.mark.parametrize("name", TREES)
def test_every_tree_equals_plain_decoding(name):
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES[name])
    accepted: list[int] = []
    for prompt, expected in zip(PROMPTS[:10], plain_answers(10, 40), strict=True):
        answer, log = tree_answer(decoder, prompt, 40)
        assert answer == expected
        assert len(answer) == 40
        # the first token costs no step, and the last step's own token may be cut off
        assert sum(log.num_accepted) + len(log.num_accepted) in (39, 40)
        accepted += log.num_accepted
    assert max(accepted) <= TREES[name].depth
    if name == "root only":
        assert accepted == [0] * 390
    else:  # the test says something only when nodes are accepted, and when some are not
        assert {0, 1} <= set(accepted)
    if name in ("chain", "wide"):
        assert max(accepted) >= 3


def test_own_projections_and_new_heads_equal_plain_decoding_too():
    backbone = shared_backbone()
    own = train_briefly(backbone, PROMPTS[:2], layout=OWN, num_heads=3, epochs=10)
    new = MedusaHeads(3, 1, backbone, OWN).requires_grad_(False)
    for heads in (own, new):
        decoder = TreeDecoder(backbone, heads, EXAMPLE)
        for prompt, expected in zip(PROMPTS[:3], plain_answers(3, 40), strict=True):
            assert tree_answer(decoder, prompt, 40)[0] == expected


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64},
    "gpt_neox": {},
    "mistral": {"sliding_window": 64},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_equals_plain_decoding_and_generate(kind):
    backbone = tiny_backbone(kind, **ARCHITECTURES[kind])
    check_rows(backbone)
    decoder = TreeDecoder(backbone, random_heads(backbone, 3), TREES["gaps"])
    for prompt in PROMPTS[:2]:
        expected = plain_answer(backbone, prompt, 24)
        assert tree_answer(decoder, prompt, 24)[0] == expected
        assert generated(backbone, prompt, 24) == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_attention_implementations_equal_plain_decoding(kind, attention):
    backbone = tiny_backbone(kind, **ARCHITECTURES[kind])
    backbone.model.set_attn_implementation(attention)
    decoder = TreeDecoder(backbone, random_heads(backbone, 3), EXAMPLE)
    for prompt in PROMPTS[:2]:
        assert tree_answer(decoder, prompt, 20)[0] == plain_answer(backbone, prompt, 20)


def generated(backbone: Backbone, prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = torch.tensor([prompt])
    output = backbone.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(backbone.eos_ids) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def test_plain_decoding_equals_generate_with_an_end():
    backbone = with_eos(shared_backbone(), 3, 28)
    lengths = set()
    for prompt in PROMPTS[:6]:
        answer = plain_answer(backbone, prompt, 30)
        assert answer == generated(backbone, prompt, 30)
        lengths.add(len(answer))
    assert len(lengths) > 2


# Token 0 as ordinary text: Medusa pads short paths with it and accepts the padding


@cache
def zero_backbone() -> Backbone:
    """Return the shared backbone with the names of token 0 and its favourite token swapped."""
    model = tiny_model()
    said = [token for answer in plain_answers(10, 40) for token in answer]
    favourite = max(range(VOCAB), key=said.count)
    for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
        weight[[0, favourite]] = weight[[favourite, 0]]
    return Backbone("zero", "", model, tiny_tokenizer(), frozenset())


@cache
def zero_heads() -> MedusaHeads:
    return train_briefly(zero_backbone(), PROMPTS[:4], epochs=15)


@pytest.mark.parametrize("name", ["star", "example", "gaps", "wide"])
def test_phantom_acceptance_of_token_zero(name):
    backbone = zero_backbone()
    decoder = TreeDecoder(backbone, zero_heads(), TREES[name])
    zeros = 0
    for prompt in PROMPTS[:6]:
        expected = plain_answer(backbone, prompt, 40)
        answer, log = tree_answer(decoder, prompt, 40)
        assert answer == expected
        assert sum(count + 1 for count in log.num_accepted) >= 39
        zeros += expected.count(0)
    assert zeros > 15


def accepted_rows(tokens: Tensor, predicted: Tensor) -> list[int]:
    """Return the rows of the example tree that greedy acceptance keeps."""
    logits = torch.nn.functional.one_hot(predicted, VOCAB).float()
    accepted = example_decoder().accept(tokens[None], logits[None])
    assert int(accepted.next_token) == int(predicted[accepted.node])
    return EXAMPLE.ancestor_mask[int(accepted.node)].nonzero()[0].tolist()


def test_nothing_follows_a_short_leaf_when_the_backbone_wants_token_zero():
    tokens = torch.tensor([9, 5, 6, 7, 8, 4])
    predicted = torch.tensor([6, 0, 0, 0, 0, 0])  # node 2, a leaf at depth 1, then 0 for ever
    assert accepted_rows(tokens, predicted) == [0, 2]


# Endings


def first_at(answer: list[int], index: int) -> bool:
    return answer[index] not in answer[:index]


@pytest.mark.parametrize("name", ["chain", "example", "wide"])
def test_stops_exactly_at_the_end_token_wherever_it_falls(name):
    seen_inside = 0
    for prompt, whole in zip(PROMPTS[:6:2], plain_answers(6, 40)[::2], strict=True):
        for index in (i for i in range(30) if first_at(whole, i)):
            backbone = with_eos(shared_backbone(), whole[index])
            decoder = TreeDecoder(backbone, shared_heads(), TREES[name])
            log = StepLog()
            steps = list(decoder.decode(prompt, 40, log))
            assert [token for step in steps for token in step] == whole[: index + 1]
            for step, count in zip(steps[1:], log.num_accepted, strict=True):
                assert count in (len(step), len(step) - 1)
            seen_inside += len(steps) > 1 and log.num_accepted[-1] == len(steps[-1])
    assert seen_inside > 0  # the end token itself was a draft token


@pytest.mark.parametrize("name", ["root only", "example", "wide"])
def test_stops_exactly_at_every_limit(name):
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES[name])
    cut = 0
    for limit in range(1, 21):
        prompt, whole = PROMPTS[0], plain_answers(1, 40)[0]
        answer, log = tree_answer(decoder, prompt, limit)
        assert answer == plain_answer(shared_backbone(), prompt, limit) == whole[:limit]
        assert sum(log.num_accepted) <= max(0, limit - 1)
        cut += sum(log.num_accepted) + len(log.num_accepted) > limit - 1
    assert cut > 0 or name == "root only"


def test_first_token_costs_no_step():
    answer, log = tree_answer(example_decoder(), PROMPTS[0], 1)
    assert answer == plain_answers(1, 40)[0][:1]
    assert log.num_accepted == []


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_contexts_end_is_reached_and_never_passed(kind, monkeypatch):
    context = 40
    changes = {**ARCHITECTURES[kind], "max_position_embeddings": context}
    if kind == "mistral":
        changes = {"sliding_window": context}
    backbone = tiny_backbone(kind, **changes)
    positions: list[int] = []
    ends: list[int] = []
    forward = Backbone.forward

    def watched(
        self: Backbone, ids: Tensor, cache: Any, where: Any = None, mask: Any = None
    ) -> Any:
        positions.append(int(where.max()) if where is not None else cache.length + ids.shape[1] - 1)
        ends.append(cache.length + ids.shape[1])
        return forward(self, ids, cache, where, mask)

    monkeypatch.setattr(Backbone, "forward", watched)
    heads = random_heads(backbone, 4)
    for name in ("chain", "example", "wide"):
        decoder = TreeDecoder(backbone, heads, TREES[name])
        for length in (1, 20, 36, 38, 39):
            prompt = (PROMPTS[0] * 9)[:length]
            expected = plain_answer(backbone, prompt, 99)
            assert len(expected) == context - length + 1
            assert tree_answer(decoder, prompt, 99)[0] == expected
    assert max(positions) == context - 1
    # a tree that stands beyond the context has scratch room there, and nothing of it is emitted
    assert max(ends) <= context + TREES["wide"].tree_size


def test_prompts_that_cannot_be_answered():
    backbone, decoder = shared_backbone(), example_decoder()
    cache_ = backbone.new_cache(CONTEXT)
    for prompt, message in [
        ([], "the prompt is empty"),
        ([1] * CONTEXT, f"{CONTEXT} tokens; the context holds {CONTEXT}"),
        ([1] * (CONTEXT + 9), f"{CONTEXT + 9} tokens; the context holds {CONTEXT}"),
    ]:
        for answer in (
            decoder.decode(prompt, 5),
            decode_plain(backbone, cache_, prompt, 5),
        ):
            with pytest.raises(DataError, match=message):
                next(answer)
        with pytest.raises(DataError, match=message):
            next(answer_batch(backbone, [[1, 2], prompt], 5))
    assert room_for(backbone, [1] * (CONTEXT - 1), 99) == 2
    assert room_for(backbone, [1], 99) == 99


def test_trees_that_do_not_fit_are_refused():
    backbone, heads = shared_backbone(), random_heads(shared_backbone(), 2)
    with pytest.raises(TreeError, match="3 deep but there are only 2 heads"):
        TreeDecoder(backbone, heads, EXAMPLE)
    with pytest.raises(TreeError, match=f"rank {VOCAB}"):
        TreeDecoder(backbone, heads, Tree.from_paths([(VOCAB,)]))
    whole = TreeDecoder(backbone, heads, Tree.from_paths([(rank,) for rank in range(VOCAB)]))
    answer, log = tree_answer(whole, PROMPTS[0], 12)  # every token is a candidate
    assert answer == plain_answers(1, 40)[0][:12]
    assert log.num_accepted == [1] * 6


# One step


def test_a_superset_accepts_at_least_as_much_from_the_same_place():
    backbone, heads = shared_backbone(), shared_heads()
    small = TREES["gaps"]
    large = Tree.from_paths(set(small.paths[1:]) | set(TREES["wide"].paths[1:]))
    sizes = {"less": 0, "same": 0}
    for prompt, whole in zip(PROMPTS[:4], plain_answers(4, 40), strict=True):
        for place in range(0, 36, 3):
            reached = []
            for tree in (small, large):
                decoder = TreeDecoder(backbone, heads, tree)
                batch = filled(decoder, prompt + whole[:place])
                with torch.inference_mode():
                    reached.append(decoder.step(batch)[0].accepted)
            assert reached[1][: len(reached[0])] == reached[0]
            assert reached[1] == whole[place + 1 :][: len(reached[1])]
            sizes["less" if len(reached[0]) < len(reached[1]) else "same"] += 1
    assert min(sizes.values()) > 0


def test_draft_takes_each_nodes_token_from_its_heads_list():
    backbone, heads = shared_backbone(), shared_heads()
    tree = TREES["gaps"]
    decoder = TreeDecoder(backbone, heads, tree)
    with torch.inference_mode():
        batch = filled(decoder, PROMPTS[0])
        batch.roots[0] = 17
        (tokens,) = decoder.draft(batch)[0].tolist()
        lists = [
            heads.project(k, heads.hidden(k, batch.states[0]))
            .sort(descending=True, stable=True)
            .indices
            for k in range(1, 5)
        ]
    expected = [17] + [int(lists[len(path) - 1][path[-1]]) for path in tree.paths[1:]]
    assert tokens == expected


def example_decoder() -> TreeDecoder:
    return TreeDecoder(shared_backbone(), shared_heads(), EXAMPLE)


def filled(decoder: TreeDecoder, prompt: list[int], num_tokens: int = 80) -> Batch:
    """Return a batch of one row that has read ``prompt``."""
    batch = decoder.new_batch(num_tokens, 1)
    with torch.inference_mode():
        decoder.fill(batch, 0, prompt, torch.Generator())
    batch.cache.length = len(prompt)
    return batch


MASK = """
    111 1.....
    111 11....
    111 1.1...
    111 11.1..
    111 11..1.
    111 11.1.1
"""


def test_mask_picture(monkeypatch):
    seen: list[Tensor] = []
    forward = Backbone.forward

    def watched(
        self: Backbone, ids: Tensor, cache: Any, where: Any = None, mask: Any = None
    ) -> Any:
        seen.append(mask)
        return forward(self, ids, cache, where, mask)

    monkeypatch.setattr(Backbone, "forward", watched)
    decoder = example_decoder()
    batch = filled(decoder, [4, 5, 6])
    with torch.inference_mode():
        decoder.verify(batch.cache, torch.arange(6)[None])
    picture = [
        "".join("1" if value == 0 else "." for value in row) for row in seen[1][0, 0].tolist()
    ]
    assert picture == [line.replace(" ", "") for line in MASK.split("\n")[1:-1]]
    assert seen[1].min() == torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("tokens", "predicted", "rows"),
    [
        # nothing right: the root wants 9, the children say 1 and 2
        ([5, 1, 2, 3, 4, 6], [9, 3, 0, 6, 0, 0], [0]),
        # only a grandchild right: node 3 is what node 1 wants, but node 1 itself is wrong
        ([5, 1, 2, 3, 4, 6], [9, 3, 9, 6, 9, 9], [0]),
        # right to the deepest leaf
        ([5, 1, 2, 3, 4, 6], [1, 3, 9, 6, 9, 9], [0, 1, 3, 5]),
        # right to the other leaf of node 1
        ([5, 1, 2, 3, 4, 6], [1, 4, 9, 6, 9, 9], [0, 1, 4]),
        # right to the leaf beside it
        ([5, 1, 2, 3, 4, 6], [2, 3, 9, 6, 9, 9], [0, 2]),
        # a path that breaks in the middle: node 5 is what node 3 wants, node 3 is not right
        ([5, 1, 2, 3, 4, 6], [1, 9, 9, 6, 9, 9], [0, 1]),
        # the same token at every node
        ([5, 5, 2, 5, 4, 5], [5, 5, 5, 5, 5, 5], [0, 1, 3, 5]),
        # token 0 everywhere
        ([0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [0, 1, 3, 5]),
        ([0, 2, 0, 3, 1, 4], [0, 0, 0, 0, 0, 0], [0, 2]),
    ],
)
def test_accept_by_hand(tokens, predicted, rows):
    assert accepted_rows(torch.tensor(tokens), torch.tensor(predicted)) == rows


def test_phases_are_timed_when_asked_for():
    _, log = tree_answer(example_decoder(), PROMPTS[0], 12)
    assert tuple(log.phase_s) == PHASES
    assert all(seconds > 0 for seconds in log.phase_s.values())


# Batches


@pytest.mark.parametrize("eos", [(), (3, 19)], ids=["no end", "ends"])
def test_batch_rows_equal_plain_decoding_with_teacher_forced_states(eos):
    backbone = with_eos(shared_backbone(), *eos)
    found = {}
    for ended in answer_batch(backbone, PROMPTS[:9], 30):
        for answer in ended:
            assert tuple(answer.prompt) not in found
            found[tuple(answer.prompt)] = answer
    assert len({len(prompt) for prompt in PROMPTS[:9]}) > 4
    assert set(found) == {tuple(prompt) for prompt in PROMPTS[:9]}
    for prompt in PROMPTS[:9]:
        answer = found[tuple(prompt)]
        assert answer.tokens == plain_answer(backbone, prompt, 30)
        sequence = torch.tensor([prompt + answer.tokens[:-1]])
        with torch.inference_mode():
            states = backbone.forward(sequence, backbone.new_cache(sequence.shape[1]))[0]
        forced = states[len(prompt) - 1 :]
        assert answer.hidden.shape == forced.shape
        torch.testing.assert_close(answer.hidden, forced, rtol=1e-3, atol=1e-3)
    lengths = {len(answer.tokens) for answer in found.values()}
    assert len(lengths) > 3 if eos else lengths == {30}


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_batches_of_other_architectures(kind):
    backbone = tiny_backbone(kind, **ARCHITECTURES[kind])
    for ended in answer_batch(backbone, PROMPTS[:4], 12):
        for answer in ended:
            assert answer.tokens == plain_answer(backbone, list(answer.prompt), 12)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_batch_rows_end_at_the_contexts_end_as_plain_decoding_does(kind):
    backbone = tiny_backbone(kind, **{**ARCHITECTURES[kind], "max_position_embeddings": 40})
    prompts = [(PROMPTS[0] * 9)[:length] for length in (39, 30, 5, 12, 38, 7, 9)]
    answers = [answer for ended in answer_batch(backbone, prompts, 99) for answer in ended]
    assert sorted(len(answer.tokens) for answer in answers) == [2, 3, 11, 29, 32, 34, 36]
    for answer in answers:
        assert answer.tokens == plain_answer(backbone, list(answer.prompt), 99)


def test_like_length_covers_everything_once():
    batches = list(like_length(PROMPTS, 5))
    assert sorted(index for batch in batches for index in batch) == list(range(len(PROMPTS)))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 4]
    lengths = [len(PROMPTS[index]) for batch in batches for index in batch]
    assert lengths == sorted(lengths)


# Streamed text


def test_stream_is_the_text_of_plain_decoding():
    backbone = with_eos(shared_backbone(), 28)
    stream = TextStream(TreeDecoder(backbone, shared_heads(), EXAMPLE), [5, 6, 1, 2], 30)
    pieces = list(stream)
    answer = plain_answer(backbone, [5, 6, 1, 2], 30)
    assert len(pieces) > 3
    assert "".join(pieces) == backbone.decode(answer)
    assert stream.summary().startswith(f"{len(answer)} tokens in ")


def test_stream_holds_back_half_a_character(monkeypatch):
    def decode(self: Backbone, tokens: list[int]) -> str:
        """Read every three tokens as the three bytes of ``aé``."""
        return ("aé".encode() * len(tokens))[: len(tokens)].decode("utf-8", "replace")

    monkeypatch.setattr(Backbone, "decode", decode)
    stream = TextStream(
        TreeDecoder(shared_backbone(), shared_heads(), TREES["root only"]), [5, 1, 2], 8
    )
    assert list(stream) == ["a", "é", "a", "é", "a", "\ufffd"]
