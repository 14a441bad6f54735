"""Packed linear layers compute what the layers they stand for do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests import tiny
from treeopt.models.packed import PackedLinear, packed_twin


@pytest.fixture(scope="module")
def bfloat16_model():
    return tiny.tiny_model(hidden_size=64).to(torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 70])
def test_a_packed_layer_equals_its_linear_layer(rows, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 80, bias=bias).to(torch.bfloat16)
    hidden = torch.randn(2, rows, 96).to(torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(hidden), linear(hidden))


def test_the_twin_shares_parameters_and_leaves_the_model_alone(bfloat16_model):
    twin = packed_twin(bfloat16_model)
    assert isinstance(twin.lm_head, PackedLinear)
    assert type(bfloat16_model.lm_head) is torch.nn.Linear
    assert twin.lm_head.weight is bfloat16_model.lm_head.weight
    assert not any(isinstance(module, PackedLinear) for module in bfloat16_model.modules())
    linears = [m for m in bfloat16_model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(isinstance(m, PackedLinear) for m in twin.modules()) == len(linears)


def test_float32_models_stay_as_they_are():
    assert packed_twin(tiny.tiny_model()) is None


def test_a_backbone_runs_its_twin(bfloat16_model):
    plain = dataclasses.replace(tiny.tiny_backbone(), model=bfloat16_model)
    packed = dataclasses.replace(plain, packed=packed_twin(bfloat16_model))
    tokens = torch.tensor([tiny.PROMPTS[0]])
    with torch.inference_mode():
        ours = packed.logits(packed.forward(tokens, packed.new_cache(32)))
        theirs = plain.logits(plain.forward(tokens, plain.new_cache(32)))
    torch.testing.assert_close(ours, theirs, atol=0.5, rtol=0.1)
    assert packed.machine()["linear_layers"] == "packed"
    assert plain.machine()["linear_layers"] == "as loaded"
