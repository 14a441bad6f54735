"""Modelled step times: by hand, against a published chart, and labelled wherever they appear."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from treeopt.cost import StepCost
from treeopt.errors import CostError
from treeopt.roofline import Device, ModelShape, find_device, model_cost, read_shape, step_ms

CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA_7B = ModelShape("7b", 4096, 11008, 32, 32, 32, 128, 32000, 5, 1, own_lm_heads=True)

# One layer of width 2, so that a reader can do the sums.
SMALL = ModelShape("small", 2, 3, 1, 1, 1, 2, 5, 1, 1, own_lm_heads=False)


def device(**changes: Any) -> Device:
    figures = {"tflops": 1e-12, "gb_per_s": 1e9, "tile_rows": 1, "launch_us": 0.0, **changes}
    return Device("unit", **figures)


def test_arithmetic_by_hand():
    # Operations of a plain step after 3 tokens: Q, O 2x(2x2), K, V 2x(2x2), attention 2x(2x4),
    # up, gate, down 3x(2x3), LM head 2x5; two operations each.
    assert step_ms(device(), SMALL, 0, 1, 3) == 1000 * 2 * (8 + 8 + 16 + 18 + 10)
    # A tree of two rows: twice the products, attention over 5; one head of one block, LM head.
    expected = 2 * (2 * (8 + 8 + 18 + 10) + 2 * 2 * 2 * 5 + 4 + 10)
    assert step_ms(device(), SMALL, 2, 1, 3) == 1000 * expected


def test_memory_by_hand():
    # Numbers of 2 bytes. A plain step: 4 products of 2x2 (4 + 2 + 2), scores and values (2 + 4x2),
    # 3 of 2x3 (6 + 2 + 3), the LM head (10 + 2 + 5).
    slow = device(tflops=1e9, gb_per_s=2e-9)
    assert step_ms(slow, SMALL, 0, 1, 3) == pytest.approx(1000 * (4 * 8 + 2 * 10 + 3 * 11 + 17))


def test_rows_are_padded_to_tiles_and_kernels_take_time_to_start():
    tiled = device(tile_rows=4)
    assert step_ms(tiled, SMALL, 0, 4, 3) > step_ms(device(tile_rows=1), SMALL, 0, 4, 3)
    linear = replace(SMALL, num_layers=0)
    assert step_ms(tiled, linear, 0, 1, 3) == step_ms(tiled, linear, 0, 4, 3)
    assert step_ms(tiled, linear, 0, 5, 3) == 2 * step_ms(tiled, linear, 0, 4, 3)
    launch = device(tflops=1e9, gb_per_s=1e15, launch_us=5)
    kernels = 4 + 2 + 3 + 1
    assert step_ms(launch, SMALL, 0, 1, 3) == pytest.approx(kernels * 0.005)


# Speedups that arXiv 2401.10774, appendix G, draws for a 7B Llama at 1,024 tokens on an A100 80 GB,
# read off the chart; (batch, rows): speedup. Its acceptance model is 1 + 0.477 ln(rows).
CHART = {
    (1, 64): 2.95,
    (1, 112): 2.85,
    (2, 64): 2.60,
    (4, 32): 2.25,
    (4, 64): 2.15,
    (4, 80): 1.55,
    (4, 112): 1.50,
    (8, 16): 1.8,
}


def speedup(batch: int, rows: int) -> float:
    a100 = find_device("a100-80g")
    plain, tree = (step_ms(a100, LLAMA_7B, size, batch, 1024) for size in (0, rows))
    return (1 + 0.477 * math.log(rows)) * plain / tree


@pytest.mark.parametrize(("situation", "expected"), CHART.items())
def test_published_chart_within_a_quarter(situation, expected):
    assert speedup(*situation) == pytest.approx(expected, rel=0.25)


def test_published_chart_where_the_best_sizes_lie():
    rows = (16, 32, 48, 64, 80, 96, 112)
    best = {batch: max(rows, key=lambda n: speedup(batch, n)) for batch in (1, 4, 8, 32)}
    assert best[1] >= 64
    assert (best[4], best[8], best[32]) == (32, 16, 16)
    assert speedup(32, 16) < speedup(8, 16) < speedup(1, 16)


def test_reading_weights_bounds_a_plain_step():
    a100 = find_device("a100-80g")
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000)
    bound = 1000 * weights / (a100.gb_per_s * 1e9)
    assert bound < step_ms(a100, LLAMA_7B, 0, 1, 0) < 1.05 * bound


@pytest.mark.parametrize("name", ["a40", "a100-80g", "h100", "h200", "l4", "rtx-4090"])
def test_known_devices(name):
    cost = model_cost(
        find_device(name), LLAMA_7B, sizes=[16, 64], contexts=[256, 4096], batches=[1, 32]
    )
    assert not cost.measured
    assert cost.situations() == [(1, 256), (1, 4096), (32, 256), (32, 4096)]
    for batch, context in cost.situations():
        assert cost.plain_ms(batch, context) <= cost.step_ms(16, batch, context)
        assert cost.step_ms(16, batch, context) <= cost.step_ms(64, batch, context)


def test_a_device_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("{tflops: 100, gb_per_s: 500, tile_rows: 16, launch_us: 0}")
    assert find_device(str(file)) == Device("mine", 100, 500, 16, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{tflops: 100}", "needs exactly gb_per_s, launch_us, tflops, tile_rows"),
        ("- 3", "needs exactly"),
        ("{tflops: fast, gb_per_s: 5, tile_rows: 1, launch_us: 0}", "tflops is 'fast'"),
        ("{tflops: 1, gb_per_s: 0, tile_rows: 1, launch_us: 0}", "gb_per_s is 0"),
        ("{tflops: .nan, gb_per_s: 5, tile_rows: 1, launch_us: 0}", "tflops is nan"),
        ("{a: b: c}", "is not YAML"),
    ],
)
def test_device_files_that_are_wrong(tmp_path, text, reason):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(CostError, match=reason):
        find_device(str(file))


def test_unknown_device():
    with pytest.raises(CostError, match="no device or file tpu; known devices: a40, a100-80g"):
        find_device("tpu")


def test_shape_of_a_configuration(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert replace(read_shape(file), name="7b", num_heads=5) == LLAMA_7B
    grouped = {"num_key_value_heads": 8, "head_dim": 96, "medusa_num_heads": 3, "version": "2"}
    file.write_text(json.dumps({**CONFIG, **grouped, "medusa_num_layers": 2}))
    shape = read_shape(tmp_path)
    assert (shape.num_kv_heads, shape.head_dim, shape.num_heads, shape.num_blocks) == (8, 96, 3, 2)
    assert not shape.own_lm_heads
    file.write_text(json.dumps({**CONFIG, "vocab_size": None}))
    with pytest.raises(CostError, match="vocab_size is None; a whole number above 0 is needed"):
        read_shape(file)
    file.write_text(json.dumps({**CONFIG, "num_key_value_heads": "8"}))
    with pytest.raises(CostError, match="num_key_value_heads is '8'; a whole number"):
        read_shape(file)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, arguments)


def test_the_command_says_that_times_are_modelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    options = ["--device-spec", "h100", "--model-config", "config.json", "--batch", "1,8"]
    result = run("profile", *options)
    assert result.exit_code == 0, result.output
    assert "Modelled step times of h100" in result.stdout
    value = json.loads(run("profile", *options, "--json").stdout)
    assert (value["measured"], value["device"], len(value["times"])) == (False, "h100", 44)
    cost = StepCost.load("cost.json")
    assert not cost.measured
    cost.check_matches({"backbone_sha256": "of any weights"})


def test_the_command_needs_both_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("profile", "--device-spec", "h100")
    assert result.exit_code == 2
    assert "--device-spec and --model-config need each other" in result.stderr
    both = run("profile", "--device-spec", "h100", "--model-config", "c.json", "--dtype", "float32")
    assert both.exit_code == 2
    assert "runs no model" in both.stderr
    missing = run("profile", "--device-spec", "h100", "--model-config", "none.json")
    assert missing.exit_code == 1
    assert "none.json" in missing.stderr
    assert not Path("cost.json").exists()
