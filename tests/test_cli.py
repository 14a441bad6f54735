"""The command line: what it prints, where it prints it, and how it refuses."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cli
from tests import tiny
from treeopt.cost import StepCost, StepTime
from treeopt.errors import TreeoptError
from treeopt.preset import Preset, load_preset
from treeopt.trace import RankTrace
from treeopt.tree import Tree

RATES = {"kind": "per_rank", "heads": [[0.6, 0.2, 0.1], [0.4, 0.2, 0.05]]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that need models get the tiny ones."""
    loaded = (tiny.shared_backbone(), tiny.shared_heads())
    monkeypatch.setattr(cli, "load_models", lambda **names: loaded)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def done(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str) -> str:
    """Run a command that must end with status 1 and one line; return the line."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def table(here: Path, value: object = RATES) -> str:
    (here / "table.json").write_text(json.dumps(value))
    return "table.json"


def prompts(here: Path, number: int = 6) -> str:
    rows = [{"prompt": " ".join(f"t{token}" for token in p)} for p in tiny.PROMPTS[:number]]
    (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "prompts.jsonl"


def calibrated(here: Path, *options: str) -> Result:
    return done("calibrate", "--data", prompts(here), "--max-new-tokens", "24", *options)


# The story.


def test_calibrate_build_replay_validate(here: Path, models: None) -> None:
    counted = json.loads(calibrated(here, "--json").stdout)
    assert counted["documents"] == 6
    assert counted["positions"] == 6 * 24
    assert [head["trials"] for head in counted["heads"]] == [6 * (24 - k) for k in (1, 2, 3, 4)]

    built = json.loads(done("build", "--budget", "9", "--out", "tree.yaml", "--json").stdout)
    assert built["tree_size"] == 9
    assert built["out"] == "tree.yaml"
    preset = load_preset("tree.yaml")
    assert preset.tree.tree_size == 9
    assert built["depth"] == preset.tree.depth
    assert preset.predicted is not None
    assert preset.predicted["held_out"] is True

    walked = json.loads(done("replay", "tree.yaml", "--json").stdout)
    arguments = ["validate", "tree.yaml", "--data", "prompts.jsonl", "--max-new-tokens", "24"]
    measured = json.loads(done(*arguments, "--json", "--write").stdout)
    # The same prompts and tokens: what is replayed is what is measured.
    assert measured["acceptance_length"] == walked["acceptance_length"] > 1
    assert measured["equal"] is True
    assert measured["tokens"] == 6 * 23
    assert load_preset("tree.yaml").measured[0]["acceptance_length"] > 1
    assert "measured" in done("show", "tree.yaml").stdout


def test_a_dynamic_preset_from_build_to_validate(here: Path, models: None) -> None:
    calibrated(here)
    result = done("build", "--budget", "9", "--dynamic", "--out", "tree.yaml", "--json")
    built = json.loads(result.stdout)
    preset = load_preset("tree.yaml")
    assert preset.dynamic is not None
    assert built["dynamic"] == {
        key: preset.dynamic[key] for key in ("gain", "gain_low", "gain_high")
    }
    assert ("leave out --dynamic" in result.stderr) == (built["dynamic"]["gain_low"] <= 0)
    walked = json.loads(done("replay", "tree.yaml", "--json").stdout)
    arguments = ["validate", "tree.yaml", "--data", "prompts.jsonl", "--max-new-tokens", "24"]
    measured = json.loads(done(*arguments, "--json").stdout)
    # The same prompts and tokens: what is replayed is what is measured.
    assert measured["acceptance_length"] == walked["acceptance_length"] > 1
    assert measured["equal"] is True
    text = "each step chooses its 9 rows from 128"
    assert text in " ".join(done(*arguments).stdout.split())
    assert text in " ".join(done("show", "tree.yaml").stdout.split())
    assert "Replay of tree, dynamic tree" in done("replay", "tree.yaml").stdout
    done("build", "--budget", "9", "--out", "fixed.yaml")
    compared = json.loads(done("compare", "fixed.yaml", "tree.yaml", "--json").stdout)
    assert compared["b"] == walked["acceptance_length"] != compared["a"]


def test_a_dynamic_preset_generates_the_plain_answer(here: Path, models: None) -> None:
    calibrated(here)
    done("build", "--budget", "9", "--dynamic", "--out", "tree.yaml")
    prompt = "t5 t6"
    result = done("generate", prompt, "--preset", "tree.yaml", "--max-new-tokens", "20")
    backbone = tiny.shared_backbone()
    answer = tiny.plain_answer(backbone, [5, 6, *tiny.PROMPT_END], 20)
    assert result.stdout.strip() == backbone.decode(answer)


def test_json_has_the_promised_names(here: Path, models: None) -> None:
    calibrated(here)
    built = json.loads(done("build", "--budget", "5", "--out", "p.yaml", "--json").stdout)
    assert {"tree_size", "depth", "expected_acceptance_length", "out"} <= built.keys()
    walked = json.loads(done("replay", "p.yaml", "--json").stdout)
    assert {"acceptance_length", "low", "high", "documents", "steps"} <= walked.keys()
    arguments = ["validate", "p.yaml", "--data", "prompts.jsonl", "--max-new-tokens", "8"]
    measured = json.loads(done(*arguments, "--json").stdout)
    ratios = {"overhead", "speedup_vs_plain", "speedup_vs_generate"}
    bounds = {f"{ratio}_{bound}" for ratio in ratios for bound in ("low", "high")}
    others = {"tree_size", "acceptance_length", "num_accepted_mean", "equal", "first_mismatch"}
    others |= {"tokens_per_s", "plain_tokens_per_s", "generate_tokens_per_s", "near_ties"}
    others |= {"documents", "tokens", "device", "dtype", "threads"}
    details = {f"{phase}_ms" for phase in ("prefill", "draft", "verify", "accept", "gather")}
    details |= {f"step_p{p}_ms" for p in (50, 95, 99)}
    details |= {"outside_model_share", "accepted_by_depth", "stops_by_node"}
    assert measured.keys() == ratios | bounds | others | details


def test_profile_and_automatic_budget(here: Path, models: None) -> None:
    calibrated(here)
    options = ["--context", "32", "--sizes", "1,4,8", "--rounds", "3", "--json"]
    profiled = json.loads(done("profile", *options).stdout)
    assert [row["tree_size"] for row in profiled["times"]] == [0, 1, 4, 8]
    built = json.loads(
        done("build", "--budget", "auto", "--cost", "cost.json", "--out", "p.yaml", "--json").stdout
    )
    assert built["tree_size"] in (1, 4, 8)
    assert built["sizes"] == [{"batch": 1, "context": 32, "tree_size": built["tree_size"]}]


def costs_of(here: Path, times: dict[int, float], **machine: object) -> None:
    """Write a made-up cost file for the tiny models."""
    rows = [StepTime(1, 32, size, ms, ms, ms, 9) for size, ms in times.items()]
    known = {"device": "cpu here", "dtype": "float32", "threads": 1}
    sha256 = tiny.shared_backbone().sha256
    known |= {"backbone": "tiny", "backbone_sha256": sha256, **machine}
    StepCost(tuple(rows), known).save(here / "cost.json")


AUTO = ("build", "--budget", "auto", "--cost", "cost.json", "--out", "p.yaml")


def test_automatic_budget_keeps_and_shows_the_curve(here: Path, models: None) -> None:
    calibrated(here)
    costs_of(here, {0: 10.0, 2: 10.1, 8: 10.3, 20: 40.0})
    built = json.loads(done(*AUTO, "--json").stdout)
    assert [row["tree_size"] for row in built["curve"]] == [1, 2, 8, 20]
    for row in built["curve"]:
        speed = 1000 * row["acceptance_length"] / row["step_ms"]
        assert row["tokens_per_s"] == pytest.approx(speed, abs=0.01)
    best = built["tree_size"]
    assert best in (2, 8)
    assert f"best size at batch 1, context 32: {best}, " in done(*AUTO).stdout
    shown = done("show", "p.yaml").stdout
    assert f"best size at batch 1, context 32: {best}, " in shown
    assert "Batch 1, context 32, cpu here, float32, 1 threads" in shown
    (marked,) = (line for line in shown.splitlines() if "best │" in line)
    assert marked.split()[1] == str(best)
    assert "│ plain │" in shown
    done("show", "p.yaml", "--out", "p.html")
    assert "Choice of tree size" in (here / "p.html").read_text()


def test_no_speculation_is_said_in_words(here: Path, models: None) -> None:
    calibrated(here)
    costs_of(here, {0: 10.0, 2: 90.0, 8: 100.0})
    result = done(*AUTO)
    assert "best size at batch 1, context 32: no speculation, 100.0" in result.stdout
    shown = done("show", "p.yaml").stdout
    assert shown.startswith("p: no speculation: plain decoding, the tree is its root alone")
    assert load_preset("p.yaml").tree_size == 1


def test_automatic_budget_refuses_and_doubts_costs(here: Path, models: None) -> None:
    calibrated(here)
    costs_of(here, {0: 10.0, 8: 11.0})
    assert "8 is the only tree size measured" in refused(*AUTO)
    costs_of(here, {0: 10.0, 2: 10.5, 8: 11.0}, dtype="bfloat16")
    assert "with dtype bfloat16, the calibration with float32" in refused(*AUTO)
    costs_of(here, {0: 10.0, 2: 10.0, 8: 10.0})
    assert "where more rows cost nothing" in done(*AUTO).stderr


def test_profile_finds_its_sizes_unless_each_has_to_be_compiled(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from calibration import profile
    from treeopt.cost import SIZES
    from treeopt.models import heads

    asked: list[object] = []
    row = StepTime(1, 32, 0, 1.0, 1.0, 1.0, 1)

    def measured(*models: object, sizes: object, on_warning: Any, **options: object) -> StepCost:
        asked.append(sizes)
        on_warning("the machine is noisy")
        return StepCost((row, StepTime(1, 32, 4, 1.0, 1.0, 1.0, 1)), {})

    monkeypatch.setattr(profile, "profile", measured)
    monkeypatch.setattr(heads, "compile_models", lambda backbone, heads, *rest: (backbone, heads))
    assert "warning: the machine is noisy" in done("profile").stderr
    done("profile", "--compile")
    done("profile", "--sizes", "3,9")
    assert asked == [None, list(SIZES), [3, 9]]


def test_automatic_budget_refuses_costs_of_another_backbone(here: Path, models: None) -> None:
    calibrated(here)
    done("profile", "--context", "32", "--sizes", "4", "--rounds", "1")
    cost = json.loads((here / "cost.json").read_text())
    cost["machine"] |= {"backbone": "other", "backbone_sha256": "f" * 64}
    (here / "cost.json").write_text(json.dumps(cost))
    message = refused("build", "--budget", "auto", "--cost", "cost.json", "--out", "p.yaml")
    assert "other" in message
    assert "tiny-llama-0" in message


def test_generate_streams_the_plain_answer(here: Path, models: None) -> None:
    calibrated(here)
    done("build", "--budget", "9", "--out", "p.yaml")
    prompt = "t5 t6 t7"
    result = done("generate", "--preset", "p.yaml", "--max-new-tokens", "12", prompt)
    backbone = tiny.shared_backbone()
    encoded = backbone.encode([{"role": "user", "content": prompt}])
    expected = backbone.decode(tiny.plain_answer(backbone, encoded, 12))
    assert result.stdout == expected + "\n"
    assert "tokens per step" in result.stderr


def test_distill_then_train_gives_heads_that_load(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeopt.models import backbone
    from treeopt.models.heads import load_heads

    monkeypatch.setattr(backbone, "load_backbone", lambda *names, **more: tiny.shared_backbone())
    done("distill", "--data", prompts(here), "--max-new-tokens", "16")
    done("train", "--data", "answers.jsonl", "--epochs", "1", "--held-out", "0.3")
    assert load_heads("heads.safetensors", tiny.shared_backbone()).num_heads == 4
    done("calibrate", "--mode", "teacher-forced", "--data", "answers.jsonl")
    assert RankTrace.load("calibration.safetensors").num_documents == 6


def test_train_goes_on_with_more_blocks_and_with_own_projections(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeopt.models import backbone
    from treeopt.models.heads import load_heads

    monkeypatch.setattr(backbone, "load_backbone", lambda *names, **more: tiny.shared_backbone())
    done("distill", "--data", prompts(here), "--max-new-tokens", "16")
    options = ["train", "--data", "answers.jsonl", "--epochs", "1", "--held-out", "0.3"]
    done(*options, "--layout", "own_lm_head", "--num-heads", "2", "--out", "own.safetensors")
    assert load_heads("own.safetensors", tiny.shared_backbone()).layout == "own_lm_head"
    done(*options, "--heads", "own.safetensors", "--num-blocks", "3", "--out", "deep.safetensors")
    deeper = load_heads("deep.safetensors", tiny.shared_backbone())
    assert (deeper.num_heads, deeper.num_blocks, deeper.layout) == (2, 3, "own_lm_head")
    assert "the heads have 3 blocks, more than 1" in refused(
        *options, "--heads", "deep.safetensors", "--num-blocks", "1"
    )
    for wrong, message in (
        (["--layout", "tied"], "'tied' is neither shared_lm_head nor own_lm_head"),
        (["--heads", "own.safetensors", "--layout", "own_lm_head"], "leave out --heads"),
        (["--backbone-rate", "0.001"], "--backbone-rate needs --tune-backbone"),
    ):
        result = run(*options, *wrong)
        assert result.exit_code == 2
        assert message in result.output


def test_distill_answers_prompts_of_the_models_own_and_samples(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeopt.models import backbone

    named = tiny.tiny_backbone(eos=range(0, 61, 4))
    named.tokenizer.chat_template = "t3 " + tiny.TEMPLATE
    monkeypatch.setattr(backbone, "load_backbone", lambda *names, **more: named)
    options = ["--temperature", "0.8", "--top-p", "0.9", "--samples", "2", "--max-new-tokens", "9"]
    done("distill", "--self-prompts", "3", *options)
    done("distill", "--data", prompts(here), *options)
    header, *rows = map(json.loads, (here / "answers.jsonl").read_text().splitlines())
    assert header["distilled"]["decoding"]["temperature"] == 0.8
    assert len(rows) == 2 * (3 + 6)


def test_distill_with_a_preset_answers_the_same(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeopt.models import backbone

    monkeypatch.setattr(backbone, "load_backbone", lambda *names, **more: tiny.shared_backbone())
    calibrated(here)
    done("build", "--budget", "9", "--out", "p.yaml")
    data = ["--data", prompts(here), "--max-new-tokens", "16"]
    done("distill", *data)
    done("distill", *data, "--preset", "p.yaml", "--out", "tree.jsonl")
    plain, tree = ((here / f"{name}.jsonl").read_text() for name in ("answers", "tree"))
    assert sorted(plain.splitlines()) == sorted(tree.splitlines())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --data or --self-prompts"),
        (["--data", "x.jsonl", "--self-prompts", "3"], "give --data or --self-prompts"),
        (["--self-prompts", "3", "--top-p", "0.9"], "need --temperature"),
        (["--self-prompts", "3", "--heads", "x"], "--heads need a --preset"),
    ],
)
def test_distill_refuses_options_that_do_not_fit(arguments: list[str], reason: str) -> None:
    result = run("distill", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not Path("answers.jsonl").exists()


def test_demo_leaves_preset_picture_and_report(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from calibration import demo

    backbone = tiny.tiny_backbone(max_position_embeddings=1024)
    heads = tiny.random_heads(backbone)
    monkeypatch.setattr(cli, "load_models", lambda **names: (backbone, heads))
    small = {"NUM_PROMPTS": 6, "NUM_TOKENS": 12, "CONTEXT": 32, "ROUNDS": 1, "NUM_HELD_OUT": 2}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    measured = json.loads(done("demo", "--json").stdout)
    assert measured["equal"] is True
    left = {"calibration.safetensors", "cost.json", "preset.yaml", "report.html", "tree.svg"}
    assert {file.name for file in (here / "treeopt-demo").iterdir()} == left
    assert load_preset("treeopt-demo/preset.yaml").measured[0]["documents"] == 2
    assert "Choice of tree size" in (here / "treeopt-demo/report.html").read_text()


# Output.


def test_build_from_a_table_prints_the_expected_length(here: Path) -> None:
    result = done("build", "--accuracy", table(here), "--budget", "4", "--out", "p.yaml", "--json")
    assert json.loads(result.stdout) == {
        "tree_size": 4,
        "depth": 2,
        "expected_acceptance_length": 2.04,
        "out": "p.yaml",
    }
    assert load_preset("p.yaml").ladder[:3] == ((0,), (0, 0), (1,))


def test_show_prints_the_tree(here: Path) -> None:
    done("build", "--accuracy", table(here), "--budget", "6", "--out", "p.yaml")
    assert done("show", "p.yaml").stdout.splitlines() == [
        "p: 6 rows, 2 deep",
        "decoding: greedy",
        "predicted acceptance length 2.260 (independence, no held-out text)",
        "root",
        "├─ 0      60.0 %",
        "│  ├─ 0   24.0 %",
        "│  └─ 1   12.0 %",
        "├─ 1      20.0 %",
        "└─ 2      10.0 %",
    ]


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf", "dot", "html"])
def test_show_writes_pictures(here: Path, suffix: str) -> None:
    done("show", "medusa-mc-sim-7b-63", "--out", f"tree.{suffix}")
    assert (here / f"tree.{suffix}").stat().st_size > 500


def test_a_smaller_tree_than_the_budget_is_said(here: Path) -> None:
    result = done("build", "--accuracy", table(here), "--budget", "64", "--out", "p.yaml")
    assert "only 13 rows" in result.stderr


def test_compare_prints_a_paired_difference(here: Path, models: None) -> None:
    calibrated(here)
    for budget in ("3", "9"):
        done("build", "--budget", budget, "--out", f"{budget}.yaml")
    row = json.loads(done("compare", "3.yaml", "9.yaml", "--json").stdout)
    assert row["difference"] == pytest.approx(row["b"] - row["a"], abs=2e-4)
    assert row["low"] <= row["difference"] <= row["high"]


def test_compare_says_what_flatters_and_refuses_other_models(here: Path, models: None) -> None:
    calibrated(here)
    for budget in ("3", "9"):
        done("build", "--budget", budget, "--out", f"{budget}.yaml")
    said = done("compare", "3.yaml", "9.yaml").stderr.splitlines()
    assert said == [
        f"warning: {name} was built from calibration.safetensors, which flatters it; compare on "
        "other text"
        for name in ("3", "9")
    ]
    trace = RankTrace.load("calibration.safetensors")
    other = {"backbone_sha256": "f" * 64, "backbone": "large"}
    replace(trace, provenance=trace.provenance | other).save("calibration-2.safetensors")
    arguments = ("compare", "3.yaml", "9.yaml", "--calibration", "calibration-2.safetensors")
    message = refused(*arguments)
    assert message.startswith("error: 3 was built for backbone tiny-llama-0 (sha256 ")
    assert message.endswith("the calibration for large (ffffffff)")
    # A published tree says nothing of models, so it may be tried on any.
    trees = ["medusa-mc-sim-7b-63", "medusa-zephyr-stage2"]
    assert "built for" not in run("compare", *trees).stderr


def test_validate_holds_the_prediction_against_the_measurement(here: Path, models: None) -> None:
    calibrated(here)
    done("build", "--budget", "5", "--out", "p.yaml")
    preset = load_preset("p.yaml")
    too_high = {**(preset.predicted or {}), "acceptance_length": 3.0, "low": 2.9, "high": 3.1}
    replace(preset, predicted=too_high).save("high.yaml")
    arguments = ["validate", "high.yaml", "--data", "prompts.jsonl", "--json", "--max-new-tokens"]
    result = run(*arguments, "24")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["equal"] is True
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: measured acceptance length 1.")
    assert "predicted 3.000 [2.900, 3.100] on the same prompts; the models, the tree" in message
    other = done(*arguments, "16")
    assert "warning: measured acceptance length 1." in other.stderr
    assert "of answers of another length" in other.stderr


def test_validate_shows_predicted_tokens_per_s_of_this_machine_only(
    here: Path, models: None
) -> None:
    calibrated(here)
    done("profile", "--context", "32", "--sizes", "2,8", "--rounds", "3")
    done(*AUTO)
    arguments = ["validate", "p.yaml", "--data", "prompts.jsonl", "--max-new-tokens", "24"]
    point = load_preset("p.yaml").point(load_preset("p.yaml").tree_size, 1, 32)
    assert point is not None
    measured = json.loads(done(*arguments, "--json").stdout)
    speed = point.tokens_per_s.value
    assert measured["predicted_tokens_per_s"] == pytest.approx(speed, rel=1e-3)
    shown = done(*arguments).stdout
    assert f"predicted tokens/s          {speed:.1f} [" in shown
    assert " at context 32; measured " in shown
    preset = load_preset("p.yaml")
    replace(preset, cost={**(preset.cost or {}), "dtype": "bfloat16"}).save("p.yaml")
    assert "predicted_tokens_per_s" not in json.loads(done(*arguments, "--json").stdout)
    assert "predicted tokens/s" not in done(*arguments).stdout


def served_files(here: Path) -> list[str]:
    """Write a preset, its calibration and a made-up cost; return the command that serves them."""
    calibrated(here)
    done("build", "--budget", "6", "--out", "p.yaml")
    times = [
        StepTime(batch, 256, size, ms, ms, ms, 9)
        for batch in (1, 2)
        for size, ms in ((0, 10.0), (4, 11.0), (8, 12.0 * batch))
    ]
    sha256 = tiny.shared_backbone().sha256
    StepCost(tuple(times), {"backbone": "tiny", "backbone_sha256": sha256}).save("cost.json")
    return ["simulate", "p.yaml", "--cost", "cost.json", "--rate", "8", "--requests", "20"]


def test_simulate_serves_all_policies_and_labels_every_number(here: Path, models: None) -> None:
    arguments = served_files(here)
    text = done(*arguments, "--json").stdout
    value = json.loads(text)
    assert value["simulated"] is True
    assert (value["rate"], value["max_batch"], value["context"]) == (8.0, 2, 256)
    assert (value["requests"], value["seed"]) == (20, 0)
    none, fixed, admitted = value["policies"]
    assert [side.pop("policy") for side in (none, fixed, admitted)] == [
        "plain",
        "fixed 6",
        "admitted",
    ]
    for side in (none, fixed, admitted):
        assert all(key.startswith("simulated_") for key in side)
        assert all(number > 0 for number in side.values())
    assert none["simulated_acceptance_length"] == 1
    assert admitted["simulated_latency_mean_s"] < none["simulated_latency_mean_s"]
    walked = json.loads(done("replay", "p.yaml", "--json").stdout)["acceptance_length"]
    assert fixed["simulated_acceptance_length"] == pytest.approx(walked, rel=0.1)
    again, other = (done(*arguments, "--json", "--seed", seed).stdout for seed in "01")
    assert again == text
    assert json.loads(other)["policies"] != json.loads(text)["policies"]
    shown = done(*arguments).stdout
    assert shown.startswith("Simulated: p, 20 requests at 8.0/s")
    assert "admitted" in shown


def test_simulate_refuses_what_it_cannot_serve(here: Path, models: None) -> None:
    arguments = served_files(here)
    assert "a rate of -1.0 requests/s" in refused(*arguments, "--rate", "-1")
    assert "a rate of nan requests/s" in refused(*arguments, "--rate", "nan")
    assert "a batch of 3 was not measured" in refused(*arguments, "--max-batch", "3")
    assert "context 512 was not measured" in refused(*arguments, "--context", "512")
    assert "cannot read gone.json" in refused(*arguments, "--cost", "gone.json")
    cost = json.loads((here / "cost.json").read_text())
    (here / "other.json").write_text(json.dumps(cost | {"machine": {"backbone_sha256": "f" * 64}}))
    assert "measured with backbone None (sha256 ffffffff)" in refused(
        *arguments, "--cost", "other.json"
    )
    # A published tree, whose paths come without probabilities.
    (here / "medusa.json").write_text("[[0], [0, 0], [1]]")
    done("convert", "medusa.json", "--to", "preset", "--out", "medusa.yaml")
    assert "has no tree.path_probs" in refused("simulate", "medusa.yaml", *arguments[2:])


def test_show_names_the_rule_and_what_was_modelled(here: Path) -> None:
    sizes = ({"batch": 1, "context": 256, "tree_size": 2, "modelled": "h100"},)
    rule = {"rule": "typical", "temperature": 0.7, "epsilon": 0.09, "delta": 0.3}
    Preset("mine", ((0,), (1,)), 2, decoding=rule, sizes=sizes).save("mine.yaml")
    text = done("show", "mine.yaml").stdout
    assert "decoding: typical, temperature 0.7, epsilon 0.09, delta 0.3 (lossy" in text
    assert "best size at batch 1, context 256: 2 (modelled for h100)" in text
    done("show", "mine.yaml", "--out", "mine.html")
    page = (here / "mine.html").read_text()
    assert "batch 1, context 256: 2 (modelled for h100)" in page
    assert "decoding: greedy\n" in done("show", "medusa-mc-sim-7b-63").stdout


def test_convert_round_trip(here: Path) -> None:
    done("convert", str(Path(cli.__file__).parent / "presets/medusa-zephyr-stage2.yaml"),
         "--to", "medusa", "--out", "choices.py")  # fmt: skip
    done("convert", "choices.py", "--to", "preset", "--out", "back.yaml")
    assert load_preset("back.yaml").ladder == load_preset("medusa-zephyr-stage2").ladder


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, cli, treeopt\n"
        "from click.testing import CliRunner\n"
        "assert 'calibrate' in CliRunner().invoke(cli.main, ['--help']).output\n"
        "heavy = {'torch', 'transformers', 'networkx', 'graphviz', 'pygraphviz'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_every_command_has_help() -> None:
    for name in cli.main.commands:
        assert done(name, "--help").stdout.startswith("Usage: ")


# Refusals: one line, status 1, nothing written.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "holds no prompts"),
        ("[]", "holds no prompts"),
        ('{"prompt": "a"}\n{oops', "line 2 is not valid JSON"),
        ('{"query": "a", "id": 3}', "has keys query, id; expected one of instruction, messages"),
        ('{"prompt": " "}', "row 1 has an empty prompt"),
        ("[3]", "row 1 is int"),
    ],
)
def test_bad_prompts(here: Path, models: None, content: str, expected: str) -> None:
    (here / "bad.jsonl").write_text(content)
    assert expected in refused("calibrate", "--data", "bad.jsonl")
    assert not (here / "calibration.safetensors").exists()


def test_missing_and_unreadable_files(here: Path, models: None) -> None:
    assert "cannot read no.jsonl" in refused("calibrate", "--data", "no.jsonl")
    assert "cannot read ." in refused("calibrate", "--data", ".")
    assert "run `treeopt calibrate` first" in refused("build", "--out", "p.yaml")
    (here / "t.safetensors").write_bytes(b"not a trace")
    for command in (["build", "--out", "p.yaml"], ["replay", "medusa-zephyr-stage2"]):
        message = refused(*command, "--calibration", "t.safetensors")
        assert "t.safetensors is not a calibration trace" in message
    assert "no preset file or shipped preset" in refused("show", "medusa-zephir")
    (here / "broken.yaml").write_text("schema: [\nname: x")
    assert "broken YAML at line 2" in refused("show", "broken.yaml")
    assert not (here / "p.yaml").exists()


@pytest.mark.parametrize(
    ("rows", "kind", "expected"),
    [
        ([[0.6, 0.6]], "per_rank", "head 1 sums to 1.2"),
        ([[0.5, 0.4]], "cumulative", "head 1 falls at top-2"),
        ([[0.5], [-0.1]], "per_rank", "head 2 holds -0.1"),
        ([[0.5], ["x"]], "per_rank", "head 2 holds something that is not a number"),
        ([], "per_rank", "one non-empty list per head"),
        ([[0.5]], "top", "choose one of per_rank, cumulative, positional"),
        ([[0.5], [0.4]], "positional", "a positional table has one row"),
    ],
)
def test_bad_tables(here: Path, rows: list[object], kind: str, expected: str) -> None:
    path = table(here, {"heads": rows, "kind": kind})
    assert expected in refused("build", "--accuracy", path, "--out", "p.yaml")
    assert not (here / "p.yaml").exists()


def test_a_positional_table_gives_a_preset_for_sampled_candidates(here: Path) -> None:
    path = table(here, {"heads": [[0.5, 0.0, 0.3]], "kind": "positional"})
    result = done("build", "--accuracy", path, "--budget", "8", "--out", "p.yaml", "--json")
    preset = load_preset("p.yaml")
    assert preset.decoding == {"rule": "sampling", "candidates": "sampled"}
    siblings = {node: set() for node in range(preset.tree_size)}
    for parent, rank in zip(preset.tree.parents[1:], preset.tree.ranks[1:], strict=True):
        siblings[parent].add(rank)
    assert all(ranks == set(range(len(ranks))) for ranks in siblings.values())
    expected = json.loads(result.stdout)["expected_acceptance_length"]
    assert preset.predicted == {
        "acceptance_length": pytest.approx(expected, abs=1e-4),
        "method": "positional rates",
        "held_out": False,
    }
    done("build", "--accuracy", path, "--budget", "64", "--max-depth", "2", "--out", "q.yaml")
    assert load_preset("q.yaml").tree.depth == 2
    assert load_preset("q.yaml").tree_size == 1 + 3 + 6  # rank 1 is there for rank 2's sake
    assert "depth 0" in refused("build", "--accuracy", path, "--max-depth", "0", "--out", "r.yaml")


@pytest.mark.parametrize("budget", ["0", "-3"])
def test_budgets_below_one(here: Path, budget: str) -> None:
    message = refused("build", "--accuracy", table(here), f"--budget={budget}", "--out", "p.yaml")
    assert f"a budget of {budget} rows is too small" in message


def test_limits_beyond_the_heads(here: Path) -> None:
    path = table(here)
    deep = refused("build", "--accuracy", path, "--max-depth", "3", "--out", "p.yaml")
    assert "depth 3 is not between 1 and the 2 heads" in deep
    wide = refused("build", "--accuracy", path, "--max-ranks", "4", "--out", "p.yaml")
    assert "4 ranks is not between 1 and the 3 known" in wide


def test_a_tree_that_the_trace_or_the_heads_cannot_hold(here: Path, models: None) -> None:
    calibrated(here)
    (here / "deep.json").write_text(json.dumps([[0] * depth for depth in range(1, 6)]))
    done("convert", "deep.json", "--to", "preset", "--out", "deep.yaml")
    assert "5 deep but there are only 4 heads" in refused("replay", "deep.yaml")
    message = refused("validate", "deep.yaml", "--data", "prompts.jsonl")
    assert "5 deep but there are only 4 heads" in message
    (here / "wide.json").write_text(json.dumps([[40]]))
    done("convert", "wide.json", "--to", "preset", "--out", "wide.yaml")
    assert "uses rank 40; only ranks below 32" in refused("replay", "wide.yaml")


def test_paths_without_a_parent(here: Path) -> None:
    (here / "orphan.json").write_text("[[0], [1, 0]]")
    message = refused("convert", "orphan.json", "--to", "preset", "--out", "p.yaml")
    assert "path [1, 0] has no parent: [1]" in message


def test_heads_that_are_not_there(here: Path) -> None:
    message = refused("calibrate", "--heads", "nowhere.safetensors")
    assert "no heads at nowhere.safetensors" in message


def test_models_that_are_not_there(here: Path) -> None:
    from treeopt.models.heads import MedusaHeads

    heads: MedusaHeads = tiny.shared_heads()
    heads.save(here / "h.safetensors")
    for name in ("./nowhere", "/nowhere/at/all"):
        message = refused("calibrate", "--backbone", name, "--heads", "h.safetensors")
        assert f"no model directory at {name}" in message


def test_usage_errors_exit_with_2(here: Path) -> None:
    for arguments in (
        ["build"],
        ["build", "--budget", "many", "--out", "p.yaml"],
        ["build", "--budget", "auto", "--out", "p.yaml"],
        ["build", "--budget", "8", "--cost", "c.json", "--out", "p.yaml"],
        ["simulate", "p.yaml", "--rate", "2"],
        ["simulate", "p.yaml", "--cost", "c.json"],
        ["simulate", "p.yaml", "--cost", "c.json", "--rate", "2", "--max-batch", "0"],
        ["profile", "--batch", "0"],
        ["profile", "--context", "big"],
        ["calibrate", "--max-new-tokens", "1"],
        ["generate", "hello"],
        ["build", "--accuracy", "t.json", "--dynamic", "--out", "p.yaml"],
        ["nonsense"],
    ):
        assert run(*arguments).exit_code == 2, arguments


def test_ctrl_c_leaves_files_alone(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from calibration import collect

    calibrated(here)
    before = (here / "calibration.safetensors").read_bytes()

    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "collect", interrupted)
    result = run("calibrate", "--data", "prompts.jsonl")
    assert result.exit_code == 130
    assert result.stderr.strip() == "error: interrupted; no file is left half-written"
    assert (here / "calibration.safetensors").read_bytes() == before
    assert sorted(path.name for path in here.iterdir()) == [
        "calibration.safetensors",
        "prompts.jsonl",
    ]


def test_a_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = table(here)
    (here / "p.yaml").write_text("old")
    monkeypatch.setattr(Path, "write_text", full)
    message = refused("build", "--accuracy", path, "--budget", "4", "--out", "p.yaml")
    assert message == "error: cannot write p.yaml: No space left on device"
    assert (here / "p.yaml").read_text() == "old"
    assert sorted(file.name for file in here.iterdir()) == ["p.yaml", "table.json"]


def accept_the_first_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decoders accept the first child unseen."""
    from treeopt.decoder.rules import Accepted
    from treeopt.decoder.tree import TreeDecoder

    def first_child(self: TreeDecoder, tokens: Any, logits: Any, *rest: Any) -> Accepted:
        return Accepted(tokens.new_tensor([1]), logits[:, 1].max(-1).indices)

    monkeypatch.setattr(TreeDecoder, "accept", first_child)


def test_validate_fails_when_outputs_differ(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(here)
    done("build", "--budget", "5", "--out", "p.yaml")
    accept_the_first_child(monkeypatch)
    result = run("validate", "p.yaml", "--data", "prompts.jsonl", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["equal"] is False
    assert json.loads(result.stdout)["first_mismatch"]["position"] >= 0
    assert "the output is not preserved" in result.stderr


def test_write_needs_a_file(models: None) -> None:
    result = run("validate", "medusa-zephyr-stage2", "--write")
    assert result.exit_code == 2
    assert "--write needs a preset file" in result.stderr


def test_errors_of_the_library_never_become_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Tree:
        raise TreeoptError("said once")

    monkeypatch.setattr("treeopt.preset.load_preset", broken)
    assert refused("show", "anything") == "error: said once"


def test_a_narrow_terminal_still_shows_everything(here: Path) -> None:
    result = CliRunner(env={"COLUMNS": "40"}).invoke(
        cli.main, ["build", "--accuracy", table(here), "--budget", "4", "--out", "p.yaml"]
    )
    assert result.exit_code == 0
    assert "2.04" in result.stdout


def test_numbers() -> None:
    assert cli.numbers("--sizes", "1,4,16") == [1, 4, 16]
    assert np.array_equal(cli.numbers("--sizes", " 8"), [8])


def test_out_of_memory_is_one_line(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from calibration import collect

    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(collect, "collect", full)
    message = refused("calibrate", "--data", prompts(here))
    assert message.startswith("error: out of memory; a smaller batch, tree, context")


def test_generate_samples_with_a_seed(here: Path, models: None) -> None:
    calibrated(here)
    done("build", "--budget", "5", "--out", "p.yaml")
    arguments = ["generate", "t5", "--preset", "p.yaml", "--max-new-tokens", "12"]
    greedy = done(*arguments).stdout
    assert done(*arguments, "--temperature", "0").stdout == greedy
    hot = [*arguments, "--temperature", "2"]
    assert done(*hot).stdout == done(*hot, "--seed", "0").stdout != done(*hot, "--seed", "1").stdout
    assert done(*hot, "--top-k", "1").stdout == greedy
    for value in ("0.9", "0"):
        assert run(*arguments, "--top-p", value).exit_code == 2
    message = refused(*arguments, "--temperature", "-1")
    assert (
        message == "error: temperature is -1.0; it must be a number above 0; 0 is the greedy rule"
    )
    assert "top_p is 1.5" in refused(*hot, "--top-p", "1.5")


def test_debug_mismatch_explains_the_first_difference(
    here: Path, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(here)
    done("build", "--budget", "5", "--out", "p.yaml")
    accept_the_first_child(monkeypatch)
    result = run("validate", "p.yaml", "--data", "prompts.jsonl", "--debug-mismatch")
    assert result.exit_code == 1
    for part in ("plain decoding says", "accepted path [0]", "ancestors [0, 1] at", "mask row 1"):
        assert part in result.stderr
