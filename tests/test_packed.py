"""Packed linear layers compute what the layers they stand for do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests import tiny
from treeopt.models.packed import PackedLinear, packed_twin

bfloat16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 kernels on this CPU"
    ),
)


@pytest.fixture(scope="module", params=[torch.float32, bfloat16], ids=str)
def model(request):
    return tiny.tiny_model(hidden_size=64).to(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 70])
def test_a_packed_layer_equals_its_linear_layer(rows, bias, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 80, bias=bias).to(dtype)
    hidden = torch.randn(2, rows, 96).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(hidden), linear(hidden))


def test_the_twin_shares_parameters_and_leaves_the_model_alone(model):
    twin = packed_twin(model)
    assert isinstance(twin.lm_head, PackedLinear)
    assert type(model.lm_head) is torch.nn.Linear
    assert twin.lm_head.weight is model.lm_head.weight
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(isinstance(m, PackedLinear) for m in twin.modules()) == len(linears)


def test_a_dtype_without_kernels_stays_as_it_is(monkeypatch):
    model = tiny.tiny_model()
    assert packed_twin(model.to(torch.float16)) is None
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert packed_twin(model.to(torch.bfloat16)) is None


def test_a_backbone_runs_its_twin(model):
    plain = dataclasses.replace(tiny.tiny_backbone(), model=model)
    packed = dataclasses.replace(plain, packed=packed_twin(model))
    tokens = torch.tensor([tiny.PROMPTS[0]])
    with torch.inference_mode():
        ours = packed.logits(packed.forward(tokens, packed.new_cache(32)))
        theirs = plain.logits(plain.forward(tokens, plain.new_cache(32)))
    torch.testing.assert_close(ours, theirs, atol=0.5, rtol=0.1)
    assert packed.machine()["linear_layers"] == "packed"
    assert plain.machine()["linear_layers"] == "as loaded"
