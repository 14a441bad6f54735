"""Checkpoints of heads as other projects write them, there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny import VOCAB, random_heads, shared_backbone, tiny_backbone
from torch import Tensor

import cli
from treeopt.errors import HeadsError
from treeopt.formats.heads import FORMATS, OWN, SHARED, HeadWeights, read_heads, write_heads
from treeopt.models.heads import load_heads

LM_HEAD = shared_backbone().lm_head.weight.half()

# Names as each project has them, written out: 2 heads of 1 block, each with its own projection.
NAMES = {
    "medusa-v1": "{}.0.linear.weight {}.0.linear.bias {}.1.weight",
    "tgi": "{}.0.linear.weight {}.0.linear.bias {}.1.weight",
    "medusa-model": "medusa_head.{}.0.linear.weight medusa_head.{}.0.linear.bias "
    "medusa_head.{}.1.weight",
    "rtp-llm": "medusa_head.{}.0.linear.weight medusa_head.{}.0.linear.bias "
    "medusa_head.{}.1.weight",
    "modelopt": "medusa_heads.{}.0.linear.weight medusa_heads.{}.0.linear.bias "
    "medusa_heads.{}.1.weight",
    "tensorrt-llm": "medusa_heads.{}.medusa_layers.0.linear.weight "
    "medusa_heads.{}.medusa_layers.0.linear.bias medusa_heads.{}.lm_head.weight",
    "vllm": "blocks.{}.layers.0.weight blocks.{}.layers.0.bias lm_heads.{}.weight",
}


def heads_of(layout: str, num_heads: int = 2, num_blocks: int = 1) -> HeadWeights:
    """Return random heads in float16, with metadata, as from a file."""
    made = random_heads(shared_backbone(), num_heads, layout, num_blocks=num_blocks)
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in made.tensors().items()}
    if layout == OWN:
        for head in range(num_heads):
            tensors[f"{head}.{num_blocks}.weight"] = (LM_HEAD + head).contiguous()
    return HeadWeights(num_heads, num_blocks, tensors, {"format": "pt", "note": "kept"})


def written(folder: Path, format_name: str) -> dict[str, Tensor]:
    file = folder / FORMATS[format_name].file
    return torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)


def assert_same(first: HeadWeights, second: HeadWeights) -> None:
    assert (first.num_heads, first.num_blocks) == (second.num_heads, second.num_blocks)
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert tensor.dtype == second.tensors[name].dtype
        assert torch.equal(tensor, second.tensors[name]), name


@pytest.mark.parametrize("format_name", NAMES)
def test_names_of_every_format(tmp_path, format_name):
    write_heads(heads_of(OWN), format_name, tmp_path / "out", None, "base")
    expected = [name for head in "01" for name in NAMES[format_name].format(*head * 3).split()]
    assert sorted(written(tmp_path / "out", format_name)) == sorted(expected)


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("format_name", NAMES)
def test_heads_with_own_projections_come_back_byte_for_byte(tmp_path, format_name, num_blocks):
    heads = heads_of(OWN, 3, num_blocks)
    write_heads(heads, "tgi", tmp_path / "first", None, "base")
    write_heads(read_heads(tmp_path / "first"), format_name, tmp_path / "other", None, "base")
    back = read_heads(tmp_path / "other")
    assert_same(back, heads)
    write_heads(back, "tgi", tmp_path / "again", None, "base")
    first, again = ((tmp_path / n / FORMATS["tgi"].file).read_bytes() for n in ("first", "again"))
    assert (first == again) == (format_name != "medusa-v1")  # a pickle has no room for metadata
    assert_same(read_heads(tmp_path / "again"), heads)


@pytest.mark.parametrize("format_name", [*NAMES, "medusa-v2"])
def test_heads_that_share_the_lm_head_come_back(tmp_path, format_name):
    heads = heads_of(SHARED)
    write_heads(heads, format_name, tmp_path / "out", LM_HEAD, "base")
    there = read_heads(tmp_path / "out")
    assert there.layout == (FORMATS[format_name].layout or SHARED)
    write_heads(there, "medusa-v2", tmp_path / "back", LM_HEAD, "base")
    assert_same(read_heads(tmp_path / "back"), heads)


@pytest.mark.parametrize("format_name", [*NAMES, "medusa-v2"])
@pytest.mark.parametrize("layout", [OWN, SHARED])
def test_the_decoder_loads_every_format(tmp_path, format_name, layout):
    if (layout, format_name) == (OWN, "medusa-v2"):
        pytest.skip("it shares the LM head")
    backbone = tiny_backbone()
    backbone.lm_head.weight.data = LM_HEAD.float()
    heads = heads_of(layout)
    write_heads(heads, format_name, tmp_path / "out", LM_HEAD, "base")
    loaded = load_heads(tmp_path / "out", backbone)
    state = torch.randn(32, generator=torch.Generator().manual_seed(0))
    hidden = state @ heads.tensors["1.0.linear.weight"].float().T
    hidden = hidden + heads.tensors["1.0.linear.bias"].float()
    hidden = state + torch.nn.functional.silu(hidden)
    projection = heads.tensors["1.1.weight"] if layout == OWN else LM_HEAD
    expected = hidden @ projection.float().T
    torch.testing.assert_close(loaded.logits(state, 2)[1], expected, rtol=1e-4, atol=1e-4)


def test_configurations(tmp_path):
    def config(format_name: str, layout: str = OWN) -> dict[str, object]:
        out = tmp_path / format_name / layout
        write_heads(heads_of(layout), format_name, out, LM_HEAD, "base")
        value: dict[str, object] = json.loads((out / "config.json").read_text())
        return value

    counts = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    named = {"base_model_name_or_path": "base", **counts}
    assert config("medusa-v1") == named
    assert config("tgi") == named
    assert config("medusa-v2", SHARED) == {**named, "version": "2"}
    assert config("rtp-llm") == {"medusa_config": counts}
    assert config("modelopt") == {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1}}
    assert config("tensorrt-llm") == {"num_medusa_heads": 2, "num_medusa_layers": 1}
    vllm = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    assert config("vllm") == vllm
    assert config("vllm", SHARED) == {**vllm, "original_lm_head": True}


def test_vllm_reads_a_shared_lm_head_once(tmp_path):
    write_heads(heads_of(SHARED), "vllm", tmp_path / "out", LM_HEAD, None)
    tensors = written(tmp_path / "out", "vllm")
    assert [name for name in sorted(tensors) if "lm_heads" in name] == ["lm_heads.0.weight"]
    assert torch.equal(tensors["lm_heads.0.weight"], LM_HEAD)


def test_tgi_shares_the_lm_head_only_under_one_block(tmp_path):
    for num_blocks, layout in ((1, SHARED), (2, OWN)):
        out = tmp_path / str(num_blocks)
        write_heads(heads_of(SHARED, 2, num_blocks), "tgi", out, LM_HEAD, None)
        assert read_heads(out).layout == layout


@pytest.mark.parametrize("format_name", ["medusa-v1", "vllm", "modelopt", "tensorrt-llm"])
def test_v2_heads_are_not_written_where_projections_would_stay_random(tmp_path, format_name):
    with pytest.raises(HeadsError, match=r"the projections would stay random; name the --backbone"):
        write_heads(heads_of(SHARED), format_name, tmp_path / "out", None, None)
    assert list(tmp_path.iterdir()) == []


def test_v1_heads_become_v2_only_if_nothing_is_lost(tmp_path):
    with pytest.raises(HeadsError, match="these heads own projections; name the --backbone"):
        write_heads(heads_of(OWN), "medusa-v2", tmp_path / "out", None, None)
    with pytest.raises(HeadsError, match=r"projection 1\.1\.weight is not the backbone's LM head"):
        write_heads(heads_of(OWN), "medusa-v2", tmp_path / "out", LM_HEAD, None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for out in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(HeadsError, match="exists; heads are written to a new or an empty"):
            write_heads(heads_of(OWN), "vllm", out, None, None)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_heads_among_a_whole_models_weights(tmp_path):
    heads = heads_of(OWN)
    write_heads(heads, "medusa-model", tmp_path / "out", None, None)
    file = tmp_path / "model.safetensors"
    base = {"model.norm.weight": torch.ones(32), "lm_head.weight": LM_HEAD}
    save_file({**written(tmp_path / "out", "medusa-model"), **base}, file)
    assert_same(read_heads(tmp_path), heads)


def sharded(folder: Path, heads: HeadWeights) -> Path:
    """Write a whole model with ``heads`` in three files and an index."""
    folder.mkdir()
    names = {f"medusa_head.{name}": tensor for name, tensor in heads.tensors.items()}
    shards = [{"model.norm.weight": torch.ones(3)}, {}, {"lm_head.weight": LM_HEAD}]
    for place, (name, tensor) in enumerate(names.items()):
        shards[1 + place % 2][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("layout", [OWN, SHARED])
def test_heads_among_the_shards_of_a_whole_model(tmp_path, layout):
    heads = heads_of(layout)
    index = sharded(tmp_path / "model", heads)
    (tmp_path / "model" / "model-0.safetensors").unlink()  # holds no heads, so nobody reads it
    for path in (index, index.parent):
        assert_same(read_heads(path), heads)
    first = load_heads(index.parent, shared_backbone()).sha256
    other = tmp_path / "other"
    sharded(other, replace(heads, tensors={n: t + 1 for n, t in heads.tensors.items()}))
    assert load_heads(other, shared_backbone()).sha256 != first
    (index.parent / "model-1.safetensors").unlink()
    with pytest.raises(HeadsError, match="model-1"):
        read_heads(index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": {"medusa_head.0.0.linear.weight": "../x"}}', "names '../x', which is no"),
        ('{"weight_map": {"model.norm.weight": "a"}}', "holds no Medusa heads"),
    ],
)
def test_an_index_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeadsError, match=message):
        read_heads(tmp_path)


def test_heads_without_biases(tmp_path):
    heads = heads_of(OWN)
    bare = {name: t for name, t in heads.tensors.items() if not name.endswith("bias")}
    write_heads(HeadWeights(2, 1, bare), "vllm", tmp_path, None, None)
    assert json.loads((tmp_path / "config.json").read_text())["medusa_fc_bias"] is False
    assert read_heads(tmp_path).tensors.keys() == bare.keys()
    loaded = load_heads(tmp_path, shared_backbone())
    assert not loaded.tensors()["1.0.linear.bias"].any()


def test_what_cannot_be_read(tmp_path):
    write_heads(heads_of(OWN), "vllm", tmp_path / "vllm", None, None)
    file = tmp_path / "vllm/model.safetensors"
    tensors = load_file(file)

    def refusal(changed: dict[str, Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises(HeadsError) as caught:
            read_heads(file)
        return str(caught.value)

    cut = {name: t for name, t in tensors.items() if name != "blocks.1.layers.0.bias"}
    assert refusal(cut) == f"{file} lacks the tensor blocks.1.layers.0.bias"
    cut = {name: t for name, t in tensors.items() if name != "lm_heads.0.weight"}
    assert refusal(cut) == f"{file} lacks the tensor lm_heads.0.weight"
    mapped = {**tensors, "token_map": torch.arange(9)}
    assert "maps to a cut vocabulary (token_map)" in refusal(mapped)
    more = {**tensors, "lm_heads.2.weight": LM_HEAD.clone()}
    assert refusal(more).endswith("has a tensor lm_heads.2.weight that 2 heads do not need")
    torch.save({"heads": 3}, tmp_path / "odd.pt")
    with pytest.raises(HeadsError, match=r"odd\.pt is not a torch file of plain tensors"):
        read_heads(tmp_path / "odd.pt")


def test_an_lm_head_that_is_not_the_backbones(tmp_path):
    write_heads(heads_of(SHARED), "vllm", tmp_path, LM_HEAD + 1, None)
    with pytest.raises(HeadsError, match="brings an LM head that is not the backbone's"):
        load_heads(tmp_path, shared_backbone())


def test_the_command(tmp_path, monkeypatch):
    from treeopt.models import backbone

    monkeypatch.setattr(backbone, "load_backbone", lambda *names: shared_backbone())
    source, out = tmp_path / "heads.safetensors", tmp_path / "vllm"
    random_heads(shared_backbone(), 2).save(source)
    command = ["convert", str(source), "--to", "vllm", "--out", str(out)]
    refused = CliRunner().invoke(cli.main, command)
    assert refused.exit_code == 1
    assert "name the --backbone to bring it along" in refused.stderr
    assert not out.exists()
    result = CliRunner().invoke(cli.main, [*command, "--backbone", "tiny"])
    assert result.exit_code == 0, result.output
    assert load_heads(out, shared_backbone()).num_heads == 2
    unknown = CliRunner().invoke(cli.main, [*command[:3], "onnx", *command[4:]])
    assert "unknown format 'onnx'; known: json, medusa, preset, medusa-v1" in unknown.stderr
