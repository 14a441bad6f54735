"""Tiny seeded models, built in a second and deterministic, for every test that needs torch.

Their weights are random but large, so that greedy output varies; heads are trained for a moment on
the model's own answers, so that trees accept something but not everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from calibration.data import Dataset, Prompt
from treeopt.decoder.plain import answer_batch, decode_plain
from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.formats.heads import SHARED
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.training.distill import Distilled
from treeopt.training.loop import Plan, fit
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.states import compute_states
from treeopt.tree import Tree

VOCAB, CONTEXT = 61, 192
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} t1 {% endfor %}"
    "{% if add_generation_prompt %}t2{% endif %}"
)

PROMPT_END = [1, 2]
ENDING = (3, 28)  # end tokens with which some answers end soon, and some do not

# The shapes that a decoder must get right, by name.
TREES = {
    "root only": Tree.from_paths([]),
    "one node": Tree.from_paths([(0,)]),
    "chain": Tree.from_paths([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]),
    "star": Tree.from_paths([(rank,) for rank in range(7)]),
    "example": Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
    "gaps": Tree.from_paths([(0,), (3,), (0, 2), (3, 0), (3, 0, 1), (3, 0, 5), (0, 2, 0)]),
    "wide": Tree.from_paths(
        [(a,) for a in range(12)]
        + [(a, b) for a in range(4) for b in range(6)]
        + [(a, b, c) for a in range(2) for b in range(3) for c in range(4)]
        + [(0, 0, 0, d) for d in range(5)]
    ),
}


def tiny_model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Return a random causal LM of the architecture ``kind``."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = transformers.CONFIG_MAPPING[kind](**{**settings, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def tiny_tokenizer(vocab: int = VOCAB) -> Any:
    """Return a tokenizer of the words ``t0 t1 …`` with a chat template."""
    words = {f"t{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = TEMPLATE
    return wrapped


def tiny_backbone(
    kind: str = "llama", seed: int = 0, eos: Sequence[int] = (), **changes: Any
) -> Backbone:
    """Return a tiny backbone; ``changes`` go into the model's configuration."""
    model = tiny_model(kind, seed, **changes)
    name = f"tiny-{kind}-{seed}"
    tokenizer = tiny_tokenizer(model.config.vocab_size)
    digest = hashlib.sha256(f"{name} {changes}".encode()).hexdigest()
    return Backbone(name, digest, model, tokenizer, frozenset(eos))


def with_eos(backbone: Backbone, *eos: int) -> Backbone:
    """Return the same backbone with other end tokens."""
    return Backbone(
        backbone.id, backbone.sha256, backbone.model, backbone.tokenizer, frozenset(eos)
    )


def random_prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of unlike length, 4 to 18 tokens, that end as the tiny template ends them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 17, (number,), generator=generator).tolist()
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() + PROMPT_END for n in lengths]


def dataset_of(prompts: Sequence[Sequence[int]]) -> Dataset:
    """Return ``prompts``, which end as the tiny template ends them, as chats."""
    rows = []
    for prompt in prompts:
        assert list(prompt[-2:]) == PROMPT_END
        words = " ".join(f"t{token}" for token in prompt[:-2])
        rows.append(Prompt([{"role": "user", "content": words}]))
    return Dataset("tiny.jsonl", "0" * 64, rows)


def plain_answer(backbone: Backbone, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the greedy answer of plain decoding."""
    cache_ = backbone.new_cache(len(prompt) + max_new_tokens)
    return list(decode_plain(backbone, cache_, prompt, max_new_tokens))


def tree_answer(
    decoder: TreeDecoder, prompt: Sequence[int], max_new_tokens: int
) -> tuple[list[int], StepLog]:
    """Return the answer of tree decoding, and what its steps did."""
    log = StepLog()
    steps = decoder.decode(prompt, max_new_tokens, log)
    return [token for emitted in steps for token in emitted], log


def own_answers(
    backbone: Backbone, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[Distilled]:
    """Return the backbone's greedy answers, in the order in which they end."""
    steps = answer_batch(backbone, prompts, max_new_tokens)
    return [Distilled(list(a.prompt), a.tokens) for ended in steps for a in ended]


def random_heads(
    backbone: Backbone,
    num_heads: int = 4,
    layout: str = SHARED,
    *,
    num_blocks: int = 1,
    seed: int = 0,
) -> MedusaHeads:
    """Return heads that guess at random."""
    heads = MedusaHeads(num_heads, num_blocks, backbone, layout)
    generator = torch.Generator().manual_seed(seed)
    for block in heads.blocks.parameters():
        block.data.normal_(0, 0.3, generator=generator)
    return heads.eval().requires_grad_(False)


def train_briefly(
    backbone: Backbone,
    prompts: Sequence[list[int]],
    *,
    num_heads: int = 4,
    layout: str = SHARED,
    max_new_tokens: int = 40,
    num_blocks: int = 2,
    epochs: int = 40,
) -> MedusaHeads:
    """Return heads trained on the backbone's answers to ``prompts``."""
    rows = own_answers(backbone, prompts, max_new_tokens)
    states = compute_states(backbone, rows, num_heads)
    heads = random_heads(backbone, num_heads, layout, num_blocks=num_blocks)
    for _ in fit(HeadsTask(heads, states, states, 0.02), Plan(epochs, 128)):
        pass
    return heads.eval().requires_grad_(False)


def counting_backbone(eos: Sequence[int] = ()) -> Backbone:
    """Return a backbone that counts up, token t then t + 1, and starts again at 0 after 31."""
    model = tiny_model(vocab_size=32)
    for layer in model.model.layers:  # the hidden state is the last token's embedding alone
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(32))
    model.lm_head.weight.copy_(torch.eye(32).roll(1, 0))  # logit t + 1 reads place t
    tokenizer = tiny_tokenizer(32)
    tokenizer.chat_template = None
    return Backbone("counting", "1" * 64, model, tokenizer, frozenset(eos))


def counting_heads(backbone: Backbone, steps: Sequence[int]) -> MedusaHeads:
    """Return heads of which head k says: the backbone's token + ``steps[k - 1]``."""
    heads = MedusaHeads(len(steps), 1, backbone, SHARED).requires_grad_(False)
    for block, step in zip(heads.blocks, steps, strict=True):
        block[0].linear.weight.copy_(10 * torch.eye(32).roll(step, 0))
    return heads.eval()


@cache
def shared_backbone() -> Backbone:
    """Return the llama that most tests use; nobody changes it."""
    return tiny_backbone()


PROMPTS = random_prompts(24)


@cache
def shared_heads() -> MedusaHeads:
    """Return heads of ``shared_backbone`` that know its answers to half of ``PROMPTS``."""
    return train_briefly(shared_backbone(), PROMPTS[::2])
