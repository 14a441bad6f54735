"""The command line: arguments, one library call, a table on stdout, a file.

Results go to stdout, progress and warnings to stderr. Exit 0 done, 1 refused, 2 usage, 130
interrupted. Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treeopt import console
from treeopt.console import emit, progress, warn
from treeopt.errors import TableError, TraceError, TreeoptError
from treeopt.models.embedded import NAME as DEFAULT_BACKBONE

if TYPE_CHECKING:
    from treeopt.cost import StepCost
    from treeopt.models.backbone import Backbone
    from treeopt.models.heads import MedusaHeads
    from treeopt.preset import Preset
    from treeopt.trace import RankTrace

OUT_OF_MEMORY = "out of memory; a smaller batch, tree, context or --max-new-tokens needs less"
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
DEFAULT_TRACE = "calibration.safetensors"

Command = TypeVar("Command", bound=Callable[..., Any])


class Group(click.Group):
    """A group whose commands end in one message instead of a traceback."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command; print what a user can mend and exit with 1."""
        try:
            return super().invoke(context)
        except TreeoptError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted; no file is left half-written", INTERRUPTED)
        except OSError as error:
            fail(f"{error.filename or 'a file'}: {error.strerror or error}")
        except MemoryError:
            fail(OUT_OF_MEMORY)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's own, for a device
                raise
            fail(OUT_OF_MEMORY)


def fail(message: str, status: int = 1) -> None:
    """Print ``message`` as an error and exit with ``status``."""
    click.echo(f"error: {message}", err=True)
    sys.exit(status)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treeopt")
def main() -> None:
    """Find, prove and measure the best candidate tree for Medusa-style heads."""


def model_options(command: Command) -> Command:
    """Add the options that choose a backbone, its heads, and where they run."""
    for decorate in (
        click.option("--dtype", help="bfloat16, float16 or float32.  [default: the fastest here]"),
        click.option("--device", help="cpu, cuda, …  [default: cuda when present]"),
        click.option("--heads", help="File, directory or name.  [default: the backbone's own]"),
        click.option(
            "--backbone", help=f"Hub id, directory or GGUF.  [default: {DEFAULT_BACKBONE}]"
        ),
    ):
        command = decorate(command)
    return command


compile_option = click.option(
    "--compile/--eager",
    "compiles",
    default=False,
    show_default=True,
    help="Compile the steps for this CPU: minutes once per tree size, then from disk.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
data_option = click.option("--data", type=click.Path(path_type=Path), help="Prompt file.")
new_tokens_option = click.option(
    "--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True
)


@main.command()
@data_option
@model_options
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_TRACE, show_default=True)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option("--mode", type=click.Choice(["generate", "teacher-forced"]), default="generate")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@new_tokens_option
@json_option
def calibrate(
    data: Path | None,
    out: Path,
    limit: int | None,
    mode: str,
    batch_size: int,
    max_new_tokens: int,
    as_json: bool,
    **models: str | None,
) -> None:
    """Measure how often each head's i-th guess is right, on the backbone's own answers."""
    from calibration.collect import collect
    from calibration.data import read_dataset, shipped_prompts

    dataset = read_dataset(data or shipped_prompts(), limit)
    backbone, heads = load_models(**models)
    with progress("calibrating", len(dataset.prompts)) as advance:
        trace = collect(
            backbone,
            heads,
            dataset,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            teacher_forced=mode == "teacher-forced",
            on_progress=advance,
            on_warning=warn,
        )
    trace.save(out)
    console.show_rates(trace, str(out), as_json)


@main.command()
@model_options
@click.option("--batch", default="1", show_default=True, help="Batch sizes.")
@click.option("--context", default="256,1024", show_default=True, help="Prefix lengths.")
@click.option("--sizes", help="Only these tree sizes.  [default: where step times change, to 64]")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@compile_option
@click.option("--device-spec", help="Model another device instead: its name, or a YAML file.")
@click.option("--model-config", type=click.Path(path_type=Path), help="Of the model there.")
@click.option("--out", type=click.Path(path_type=Path), default="cost.json", show_default=True)
@json_option
def profile(
    batch: str,
    context: str,
    sizes: str | None,
    rounds: int,
    compiles: bool,
    device_spec: str | None,
    model_config: Path | None,
    out: Path,
    as_json: bool,
    **models: str | None,
) -> None:
    """Measure what a verify step costs on this machine, by tree size and context.

    Sizes are found by bisection: both sides of every edge in the step times. With --compile, where
    every size has to be compiled first, a few fixed ones are measured.

    With --device-spec and a transformers config.json nothing runs: times are modelled from the
    device's peak figures, and marked so.
    """
    from treeopt.cost import SIZES
    from treeopt.roofline import find_device, model_cost, read_shape

    batches, contexts = numbers("--batch", batch), numbers("--context", context)
    tree_sizes = numbers("--sizes", sizes) if sizes else None
    if tree_sizes is None and (compiles or device_spec):
        tree_sizes = list(SIZES)
    if (device_spec is None) != (model_config is None):
        raise click.UsageError("--device-spec and --model-config need each other")
    if device_spec and (compiles or any(models.values())):
        raise click.UsageError("--device-spec runs no model, so it takes none and compiles none")
    if device_spec and model_config and tree_sizes:
        cost = model_cost(
            find_device(device_spec),
            read_shape(model_config),
            sizes=tree_sizes,
            contexts=contexts,
            batches=batches,
        )
    else:
        cost = measure_cost(models, compiles, tree_sizes, contexts, batches, rounds)
    cost.save(out)
    console.show_cost(cost, str(out), as_json)


def measure_cost(
    models: dict[str, str | None],
    compiles: bool,
    tree_sizes: list[int] | None,
    contexts: list[int],
    batches: list[int],
    rounds: int,
) -> StepCost:
    """Return step times measured here with the real decoder."""
    from calibration.profile import profile as measure
    from treeopt.models.heads import compile_models

    backbone, heads = load_models(**models)
    if compiles and tree_sizes:
        num_tokens = max(contexts) + max(tree_sizes)
        backbone, heads = compile_models(
            backbone, heads, tree_sizes, heads.num_heads, num_tokens, console.say_compiling
        )
    with progress("profiling", None) as advance:  # how many sizes it takes is not known before
        return measure(
            backbone,
            heads,
            sizes=tree_sizes,
            contexts=contexts,
            batches=batches,
            rounds=rounds,
            on_step=lambda: advance(1, 0),
            on_warning=warn,
        )


@main.command()
@click.option(
    "--budget", default="64", show_default=True, help="Tree size, root included; or auto."
)
@click.option("--calibration", type=click.Path(path_type=Path), help="[default: the newest here]")
@click.option("--accuracy", type=click.Path(path_type=Path), help="JSON table of head accuracies.")
@click.option("--cost", type=click.Path(path_type=Path), help="Step costs, for --budget auto.")
@click.option("--model", type=click.Choice(["joint", "independent"]), default="joint")
@click.option("--max-depth", type=int, help="Use at most this many heads.")
@click.option("--max-ranks", type=int, help="Use only the first guesses of each head.")
@click.option("--dynamic", is_flag=True, help="Let every step choose its rows from the ladder.")
@click.option("--name", help="[default: the output file's]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Preset to write.")
@json_option
def build(
    budget: str,
    calibration: Path | None,
    accuracy: Path | None,
    cost: Path | None,
    name: str | None,
    out: Path,
    as_json: bool,
    **limits: Any,
) -> None:
    """Search the best tree for a budget of rows and write it as a preset."""
    if accuracy and (calibration or cost):
        raise click.UsageError("--accuracy stands alone; leave out --calibration and --cost")
    if accuracy and limits["dynamic"]:
        raise click.UsageError("--dynamic needs the heads' probabilities, which a table has not")
    if (budget == "auto") != (cost is not None):
        raise click.UsageError("--budget auto and --cost go together")
    preset = make_preset(budget, calibration, accuracy, cost, name or out.stem, limits)
    if (wanted := budget) != "auto" and preset.tree_size < int(wanted):
        warn(f"only {preset.tree_size} rows have a chance of being right; {wanted} were allowed")
    if preset.dynamic and preset.dynamic["gain_low"] <= 0:
        warn("choosing rows at every step is not sure to be better here; leave out --dynamic")
    preset.save(out)
    console.show_build(preset, str(out), as_json)


@main.command()
@click.argument("preset_name", metavar="PRESET")
@click.option("--calibration", type=click.Path(path_type=Path), help="[default: the newest here]")
@json_option
def replay(preset_name: str, calibration: Path | None, as_json: bool) -> None:
    """Predict the acceptance length exactly on a calibration, without a model."""
    from treeopt.preset import load_preset
    from treeopt.replay import replay as walk

    preset, (_, trace) = load_preset(preset_name), load_trace(calibration)
    result = walk(trace, preset.draft_tree)
    interval = result.interval()
    row = {
        "tree_size": preset.tree_size,
        "acceptance_length": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "documents": trace.num_documents,
        "steps": int(result.steps.sum()),
    }
    kind = ", dynamic tree" if preset.dynamic else ""
    emit(as_json, row, [row], f"Replay of {preset.name}{kind}")


@main.command()
@click.argument("preset_names", metavar="A B", nargs=2)
@click.option("--calibration", type=click.Path(path_type=Path), help="[default: the newest here]")
@json_option
def compare(preset_names: tuple[str, str], calibration: Path | None, as_json: bool) -> None:
    """Compare two presets on the same calibration: paired difference with interval."""
    from treeopt.files import sha256_of_file
    from treeopt.preset import load_preset
    from treeopt.replay import difference
    from treeopt.replay import replay as walk

    file, trace = load_trace(calibration)
    presets = [load_preset(name) for name in preset_names]
    for preset in presets:
        preset.check_models_of(trace)
        if (preset.calibration or {}).get("sha256") == sha256_of_file(file):
            warn(f"{preset.name} was built from {file}, which flatters it; compare on other text")
    first, second = (walk(trace, preset.draft_tree) for preset in presets)
    interval = difference(first, second)
    row = {
        "a": round(first.acceptance_length, 4),
        "b": round(second.acceptance_length, 4),
        "difference": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "documents": trace.num_documents,
    }
    emit(as_json, row, [row], f"{preset_names[1]} minus {preset_names[0]}")


@main.command()
@click.argument("preset_name", metavar="PRESET")
@click.option("--calibration", type=click.Path(path_type=Path), help="[default: the newest here]")
@click.option("--cost", "cost_file", type=click.Path(path_type=Path), required=True)
@click.option("--rate", type=float, required=True, help="Requests per second, on average.")
@click.option("--max-batch", type=click.IntRange(min=1), help="[default: the largest measured]")
@click.option("--context", type=click.IntRange(min=1), help="[default: the shortest measured]")
@click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def simulate(
    preset_name: str,
    calibration: Path | None,
    cost_file: Path,
    rate: float,
    max_batch: int | None,
    context: int | None,
    requests: int,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate a server: requests arrive at random and share calls, without a model."""
    from treeopt.cost import StepCost
    from treeopt.preset import load_preset
    from treeopt.serving import Workload
    from treeopt.serving import simulate as serve

    preset, (_, trace) = load_preset(preset_name), load_trace(calibration)
    cost = StepCost.load(cost_file)
    cost.check_matches(trace.provenance)
    context = context or min(context for _, context in cost.situations())
    max_batch = max_batch or max(batch for batch, _ in cost.situations())
    workload = Workload.poisson(trace, rate, requests, seed)
    sides = serve(trace, preset, cost, workload, max_batch=max_batch, context=context)
    console.show_served(
        preset, sides, {"rate": rate, "max_batch": max_batch, "context": context, "seed": seed},
        as_json,
    )  # fmt: skip


@main.command()
@click.argument("preset_name", metavar="PRESET")
@data_option
@click.option("--limit", type=click.IntRange(min=1), default=16, show_default=True)
@model_options
@new_tokens_option
@click.option("--write", is_flag=True, help="Append the result to the preset file.")
@compile_option
@click.option(
    "--debug-mismatch", is_flag=True, help="Explain the first difference, near-tie or not."
)
@json_option
def validate(
    preset_name: str,
    data: Path | None,
    limit: int,
    max_new_tokens: int,
    write: bool,
    compiles: bool,
    debug_mismatch: bool,
    as_json: bool,
    **models: str | None,
) -> None:
    """Decode for real: tokens/s, acceptance length, overhead, speedup, equality."""
    from calibration.validation import contradiction, measured_section, run_validation
    from treeopt.preset import load_preset

    preset = load_preset(preset_name)
    if write and not Path(preset_name).is_file():
        raise click.UsageError("--write needs a preset file, not a shipped preset's name")
    explanations: list[str] = []
    with progress("decoding", limit) as advance:
        report, dataset = run_validation(
            preset,
            *load_models_of(preset, models),
            data=data,
            limit=limit,
            max_new_tokens=max_new_tokens,
            on_prompt=lambda: advance(1, 0),
            on_mismatch=explanations.append if debug_mismatch else None,
            compiles=compiles,
            on_compile=console.say_compiling,
        )
    for explanation in explanations:
        click.echo(explanation, err=True)
    if write:
        preset.with_measured(measured_section(report, dataset)).save(preset_name)
    console.show_report(preset, report, as_json)
    if not report.equal:
        fail("tree decoding differs from plain decoding; the output is not preserved")
    if found := contradiction(preset, report, dataset, max_new_tokens):
        if found.fails:
            fail(f"{found.text}; the models, the tree or the decoder have changed")
        warn(found.text)


@main.command()
@click.argument("preset_name", metavar="PRESET")
@click.option("--out", type=click.Path(path_type=Path), help="Picture or report, by its suffix.")
def show(preset_name: str, out: Path | None) -> None:
    """Show a preset: as text, or as svg, png, pdf, dot or html by the suffix of --out."""
    from treeopt.draw import as_text, write_picture
    from treeopt.preset import load_preset

    preset = load_preset(preset_name)
    if out is None:
        click.echo(console.describe(preset))
        click.echo(as_text(preset.tree, preset.node_probs, width=console.stdout.width))
        console.show_curve(preset)
    elif out.suffix == ".html":
        write_html(preset, out)
        click.echo(f"wrote {out}")
    else:
        renderer = write_picture(out, preset.tree, preset.node_probs, preset.name)
        click.echo(f"wrote {out} (drawn by {renderer})")


@main.command()
@click.argument("prompt")
@click.option("--preset", "preset_name", required=True, help="Preset file or shipped name.")
@model_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@compile_option
@click.option("--temperature", type=float, help="0 is greedy.  [default: the preset's rule]")
@click.option("--top-p", type=float, help="With --temperature: sample from this mass only.")
@click.option("--top-k", type=int, help="With --temperature: sample from this many tokens only.")
@click.option("--seed", type=int, default=0, show_default=True)
def generate(
    prompt: str,
    preset_name: str,
    max_new_tokens: int,
    compiles: bool,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    **models: str | None,
) -> None:
    """Stream the answer to PROMPT, decoded with a preset's tree."""
    from treeopt.decoder.api import Decoder, as_messages
    from treeopt.decoder.rules import rule_from
    from treeopt.models.heads import compile_models
    from treeopt.preset import load_preset

    preset = load_preset(preset_name)
    rule = rule_from(decoding_section(preset.decoding, temperature, top_p=top_p, top_k=top_k))
    if not rule.lossless:
        warn(f"{rule.name} acceptance is lossy: answers differ from the backbone's own")
    backbone, heads = load_models_of(preset, models)
    if compiles:
        num_tokens = len(backbone.encode(as_messages(prompt))) + max_new_tokens
        num_tokens += preset.tree_size
        sizes, num_heads = (preset.tree_size,), preset.draft_tree.depth
        backbone, heads = compile_models(
            backbone, heads, sizes, num_heads, num_tokens, console.say_compiling
        )
    stream = Decoder(preset, backbone, heads, rule=rule, seed=seed).stream(prompt, max_new_tokens)
    for piece in stream:
        click.echo(piece, nl=False)
    click.echo()
    console.stderr.print(stream.summary(), style="dim")


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "format_name", required=True, help="One of the formats above.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--backbone", help="Whose LM head the heads share, for formats that need it.")
def convert(source: Path, format_name: str, out: Path, backbone: str | None) -> None:
    """Convert a tree or Medusa heads to and from other projects' formats.

    Trees: preset, json or medusa. Heads, into a directory: medusa-v1, medusa-v2, medusa-model,
    tgi, vllm, modelopt, tensorrt-llm or rtp-llm.
    """
    from treeopt.files import write_text
    from treeopt.formats.trees import WRITERS, read_tree, write_tree

    if format_name in WRITERS:
        write_text(out, write_tree(read_tree(source), format_name))
    else:
        from treeopt.formats.heads import FORMATS, read_heads, write_heads
        from treeopt.models.backbone import load_backbone

        if format_name not in FORMATS:
            known = ", ".join([*WRITERS, *FORMATS])
            raise TreeoptError(f"unknown format {format_name!r}; known: {known}")
        heads = read_heads(source)
        lm_head = load_backbone(backbone, "cpu").lm_head.weight if backbone else None
        write_heads(heads, format_name, out, lm_head, backbone)
    click.echo(f"wrote {out}")


@main.command()
@data_option
@click.option(
    "--self-prompts",
    type=click.IntRange(min=1),
    help="The model invents prompts until --out answers this many.",
)
@click.option("--out", type=click.Path(path_type=Path), default="answers.jsonl", show_default=True)
@model_options
@click.option("--preset", help="Tree to decode with: the same text, faster where rows are few.")
@click.option("--batch-size", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=256, show_default=True)
@click.option("--temperature", type=float, help="To sample at.  [default: greedy]")
@click.option("--top-p", type=float, help="With --temperature: sample from this mass only.")
@click.option("--samples", type=click.IntRange(min=1), default=1, help="Answers to each prompt.")
@click.option("--seed", type=int, default=0, show_default=True)
def distill(
    data: Path | None,
    self_prompts: int | None,
    out: Path,
    backbone: str | None,
    heads: str | None,
    device: str | None,
    dtype: str | None,
    preset: str | None,
    temperature: float | None,
    top_p: float | None,
    **options: Any,
) -> None:
    """Write the backbone's own answers, to train heads on; resumes where it was stopped.

    The prompts come from a file, or with --self-prompts from the backbone itself.
    """
    from calibration.data import read_dataset
    from treeopt.decoder.rules import rule_from
    from treeopt.models.backbone import load_backbone
    from treeopt.preset import load_preset
    from treeopt.training import distill as distillation

    if (data is None) == (self_prompts is None):
        raise click.UsageError("give --data or --self-prompts; both can add to one --out")
    if heads and not preset:
        raise click.UsageError("--heads need a --preset: plain decoding has no use for them")
    prompts = [prompt.messages for prompt in read_dataset(data).prompts] if data else []
    options["rule"] = rule_from(decoding_section({"rule": "greedy"}, temperature, top_p=top_p))
    if preset:
        loaded_preset = load_preset(preset)
        models = {"backbone": backbone, "heads": heads, "device": device, "dtype": dtype}
        model, drafting = load_models_of(loaded_preset, models)
        options["drafts"] = (drafting, loaded_preset.tree)
    else:
        model = load_backbone(backbone or DEFAULT_BACKBONE, device, dtype)
    recipe = distillation.Recipe(**options)
    with progress("answering", (self_prompts or len(prompts)) * recipe.samples) as advance:
        if self_prompts:
            distillation.distill_invented(model, self_prompts, out, recipe, advance)
        else:
            distillation.distill(model, prompts, out, recipe, advance)
    click.echo(f"wrote {out}")


@main.command()
@click.option("--data", "files", multiple=True, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default="heads.safetensors")
@model_options
@click.option("--num-heads", type=click.IntRange(min=1), help="Of new heads.  [default: 4]")
@click.option("--num-blocks", type=click.IntRange(min=1), help="[default: 2, or those of --heads]")
@click.option("--layout", help="Of new heads: shared_lm_head or own_lm_head.  [default: shared]")
@click.option("--tune-backbone", type=click.Path(path_type=Path), help="Train it too, into this.")
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--learning-rate", type=float, default=3e-3, show_default=True)
@click.option("--backbone-rate", type=float, help="[default: a quarter of --learning-rate]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Answer tokens per step.  [default: 1024; with --tune-backbone 8 whole answers]",
)
@click.option("--held-out", type=click.FloatRange(0, 0.5, min_open=True), default=0.03)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Answer tokens kept on disk.")
@click.option("--forward-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def train(
    files: tuple[Path, ...],
    out: Path,
    num_heads: int | None,
    num_blocks: int | None,
    layout: str | None,
    tune_backbone: Path | None,
    epochs: int,
    learning_rate: float,
    backbone_rate: float | None,
    batch_size: int | None,
    seed: int,
    backbone: str | None,
    heads: str | None,
    device: str | None,
    dtype: str | None,
    **options: Any,
) -> None:
    """Train heads on a backbone's answers (files of `treeopt distill`).

    New heads, or with --heads trained ones to go on from. The backbone stays as it is (Medusa-1);
    with --tune-backbone an adapter of it learns too and is merged into a new one (Medusa-2).
    Stopped, the same command goes on. `accelerate launch` starts it in several processes.
    """
    from treeopt.models.backbone import load_backbone
    from treeopt.training.loop import Plan
    from treeopt.training.processes import Processes
    from treeopt.training.run import Tuning, train_heads

    if heads and (num_heads or layout):
        raise click.UsageError("--num-heads and --layout are of new heads; leave out --heads")
    if backbone_rate and not tune_backbone:
        raise click.UsageError("--backbone-rate needs --tune-backbone")
    processes = Processes.launched()
    loaded = load_backbone(backbone or DEFAULT_BACKBONE, device or processes.device, dtype)
    tuning = None
    if tune_backbone:
        tuning = Tuning(tune_backbone, backbone_rate or learning_rate / 4)
    train_heads(
        loaded,
        files,
        out,
        heads=heads_to_train(loaded, heads, num_heads, num_blocks, layout),
        plan=Plan(epochs, batch_size or (8 if tuning else 1024), seed, processes=processes),
        learning_rate=learning_rate,
        tuning=tuning,
        on_message=console.stderr.print if processes.is_main else lambda message: None,
        **options,
    )
    if processes.is_main:
        click.echo(f"wrote {out}" + (f" and {tune_backbone}" if tune_backbone else ""))


@main.command()
@model_options
@click.option("--out", type=click.Path(path_type=Path), default="treeopt-demo", show_default=True)
@json_option
def demo(out: Path, as_json: bool, **models: str | None) -> None:
    """Run the whole story on the default model: calibrate, profile, build, validate."""
    from calibration.demo import run_demo

    result = run_demo(*load_models(**models), out, progress, warn)
    write_html(result.preset, out / "report.html")
    console.show_report(result.preset, result.report, as_json)
    click.echo(f"preset, picture and report are in {out}/", err=True)


# What the commands share.


def load_models(
    backbone: str | None = None,
    heads: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> tuple[Backbone, MedusaHeads]:
    """Return the backbone and its heads; the default backbone brings its own heads."""
    from treeopt.models.backbone import load_backbone
    from treeopt.models.heads import load_heads, resolve_heads

    name = backbone or DEFAULT_BACKBONE
    resolve_heads(heads or name)  # a wrong path should not cost the time to load a backbone
    with console.stderr.status(f"loading {name}"):
        loaded = load_backbone(name, device, dtype)
        return loaded, load_heads(heads or name, loaded)


def load_models_of(preset: Preset, models: dict[str, str | None]) -> tuple[Backbone, MedusaHeads]:
    """Return the models that a preset names, unless the options name others."""
    for key, section in (("backbone", preset.backbone), ("heads", preset.heads)):
        if section and not models.get(key):
            models = {**models, key: section["id"]}
    backbone, heads = load_models(**models)
    for loaded, section in ((backbone, preset.backbone), (heads, preset.heads)):
        if section and section["sha256"] != loaded.sha256:
            warn(f"{preset.name} was built for other weights than {loaded.id} holds; rebuild it")
    return backbone, heads


def heads_to_train(
    backbone: Backbone,
    heads: str | None,
    num_heads: int | None,
    num_blocks: int | None,
    layout: str | None,
) -> MedusaHeads:
    """Return new heads as the options ask for, or trained ones, with new blocks behind if asked."""
    from treeopt.formats.heads import OWN, SHARED
    from treeopt.models.heads import MedusaHeads, load_heads

    if layout not in (None, OWN, SHARED):
        raise click.BadParameter(f"{layout!r} is neither {SHARED} nor {OWN}")
    if not heads:
        return MedusaHeads(num_heads or 4, num_blocks or 2, backbone, layout or SHARED)
    loaded = load_heads(heads, backbone)
    return loaded.with_blocks(num_blocks) if num_blocks else loaded


def load_trace(path: Path | None) -> tuple[Path, RankTrace]:
    """Return a trace and its file: ``path``, or the newest one in this directory."""
    from treeopt.trace import RankTrace

    if path is None:
        here = sorted(Path().glob("calibration*.safetensors"), key=lambda p: p.stat().st_mtime)
        if not here:
            raise TraceError("no calibration*.safetensors here; run `treeopt calibrate` first")
        path = here[-1]
    return path, RankTrace.load(path)


def numbers(option: str, text: str) -> list[int]:
    """Return the whole numbers above 0 in ``1,4,16``."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise click.BadParameter(f"{text!r} is not a list such as 1,4,16", param_hint=option)
    return values


def make_preset(
    budget: str,
    calibration: Path | None,
    accuracy: Path | None,
    cost: Path | None,
    name: str,
    limits: dict[str, Any],
) -> Preset:
    """Return the preset that the options of ``build`` ask for."""
    from treeopt import build as builder
    from treeopt.acceptance import rates_from_table
    from treeopt.cost import StepCost
    from treeopt.files import read_json

    request = builder.Request(parse_budget(budget), **limits)
    command = shlex.join(["treeopt", *sys.argv[1:]])
    if accuracy:
        table = read_json(accuracy, TableError)
        rates = rates_from_table(table, str(accuracy))
        if table["kind"] == "positional":
            return builder.preset_from_positional_rates(
                rates[0], request, name=name, command=command
            )
        return builder.preset_from_rates(rates, request, name=name, command=command)
    path, trace = load_trace(calibration)
    return builder.preset_from_trace(
        trace,
        path,
        request,
        name=name,
        command=command,
        cost=StepCost.load(cost) if cost else None,
        on_warning=warn,
    )


def parse_budget(budget: str) -> int:
    """Return the number of rows; ``auto`` starts from the longest ladder kept."""
    from treeopt.build import LADDER_SIZE

    if budget == "auto":
        return LADDER_SIZE
    try:
        rows = int(budget)
    except ValueError:
        raise click.BadParameter(f"{budget!r} is neither a number nor auto") from None
    if rows < 1:
        raise TreeoptError(f"a budget of {rows} rows is too small; the root alone needs 1")
    return rows


def decoding_section(
    default: dict[str, Any], temperature: float | None, **limits: float | None
) -> dict[str, Any]:
    """Return the ``default`` acceptance rule, or the sampling rule that the options ask for."""
    given = {name: value for name, value in limits.items() if value is not None}
    if temperature is None:
        if given:
            raise click.UsageError("--top-p and --top-k need --temperature")
        return default
    if temperature == 0:
        return {"rule": "greedy"}
    return {"rule": "sampling", "temperature": temperature, **given}


def write_html(preset: Preset, out: Path) -> None:
    """Write the report of a preset as one HTML page."""
    from treeopt.draw import as_svg
    from treeopt.files import write_text
    from treeopt.html import html_report

    write_text(out, html_report(preset, as_svg(preset.tree, preset.node_probs)))


if __name__ == "__main__":
    main()
