"""The same equality on a CUDA device; skipped where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests import tiny
from treeopt.decoder.tree import TreeDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("tree", tiny.TREES.values(), ids=tiny.TREES)
def test_tree_decoding_equals_plain_decoding_on_cuda(tree):
    cpu = tiny.tiny_backbone()
    backbone = dataclasses.replace(cpu, model=cpu.model.to("cuda"))
    decoder = TreeDecoder(backbone, tiny.random_heads(backbone).to("cuda"), tree)
    for prompt in tiny.PROMPTS[:6]:
        answer, _ = tiny.tree_answer(decoder, prompt, 40)
        assert answer == tiny.plain_answer(backbone, prompt, 40)
