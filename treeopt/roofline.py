"""Model the step times of a device that is not here, from its peak figures alone.

Every matrix product takes as long as its arithmetic at the peak rate, or as reading and writing its
operands at the memory's rate, or as one kernel takes to start, whichever is longest. What this
leaves out (host time, caches, imperfect kernels) makes real devices slower: against the published
simulation of arXiv 2401.10774, appendix G, it is good to about a quarter.

Legend: ``B`` batch, ``n`` tree size, ``m = B n`` rows, ``L`` tokens attended to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from treeopt.cost import StepCost, StepTime
from treeopt.errors import CostError
from treeopt.files import read_json, read_text

_BYTES = 2  # of a weight, an activation and a cached key or value


@dataclass(frozen=True)
class Device:
    """Peak figures for 16-bit weights.

    tflops: dense 10^12 operations a second. gb_per_s: memory, 10^9 bytes a second.
    tile_rows: rows that a product is padded to. launch_us: the shortest kernel, microseconds.
    """

    name: str
    tflops: float
    gb_per_s: float
    tile_rows: int
    launch_us: float

    def __post_init__(self) -> None:
        for key in ("tflops", "gb_per_s", "tile_rows", "launch_us"):
            value = getattr(self, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (0 < value < math.inf or value == 0 and key == "launch_us"):
                raise CostError(f"device {self.name}: {key} is {value!r}; it must be above 0")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide what a step reads and computes."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_heads: int
    num_blocks: int
    own_lm_heads: bool


@dataclass(frozen=True)
class Product:
    """``repeats`` matrix products of [rows, inner] and [inner, outer].

    In attention each of ``sequences`` has its own, whose cached keys or values are ``kv_width``
    numbers a token.
    """

    rows: int
    inner: int
    outer: int
    repeats: int = 1
    sequences: int = 0
    kv_width: int = 0


def find_device(spec: str) -> Device:
    """Return the device of that name, or the one in a YAML file of the same keys.

    Raises:
        CostError: unknown, or a figure is missing or impossible.
    """
    known = yaml.safe_load((files("treeopt") / "devices.yaml").read_text("utf-8"))
    if spec in known:
        return _device(spec, known[spec])
    if not Path(spec).is_file():
        raise CostError(f"no device or file {spec}; known devices: {', '.join(known)}")
    try:
        return _device(Path(spec).stem, yaml.safe_load(read_text(spec, CostError)))
    except yaml.YAMLError as error:
        raise CostError(f"{spec} is not YAML: {error}") from error


def _device(name: str, value: Any) -> Device:
    wanted = {field.name for field in fields(Device)} - {"name"}
    if not isinstance(value, Mapping) or set(value) != wanted:
        raise CostError(f"device {name} needs exactly {', '.join(sorted(wanted))}")
    return Device(name, **value)


def read_shape(config: Path) -> ModelShape:
    """Return the shape in a transformers ``config.json``.

    Heads are those of its ``medusa_num_heads`` and ``medusa_num_layers``, else four of one block;
    their projections count as their own, unless it says ``"version": "2"``.

    Raises:
        CostError: unreadable, or a size is missing.
    """
    value = read_json(config / "config.json" if config.is_dir() else config, CostError)
    if not isinstance(value, dict):
        raise CostError(f"{config} is not a model's configuration")
    hidden = _size(value, "hidden_size", config)
    attention = _size(value, "num_attention_heads", config)
    return ModelShape(
        name=str(value.get("_name_or_path") or config),
        hidden_size=hidden,
        intermediate_size=_size(value, "intermediate_size", config),
        num_layers=_size(value, "num_hidden_layers", config),
        num_attention_heads=attention,
        num_kv_heads=_size(value, "num_key_value_heads", config, attention),
        head_dim=_size(value, "head_dim", config, hidden // attention),
        vocab_size=_size(value, "vocab_size", config),
        num_heads=_size(value, "medusa_num_heads", config, 4),
        num_blocks=_size(value, "medusa_num_layers", config, 1),
        own_lm_heads=str(value.get("version")) != "2",
    )


def _size(value: Mapping[str, Any], key: str, config: Path, default: int | None = None) -> int:
    size = default if value.get(key) is None else value[key]
    if not isinstance(size, int) or size < 1:
        raise CostError(f"{config}: {key} is {size!r}; a whole number above 0 is needed")
    return size


def model_cost(
    device: Device,
    shape: ModelShape,
    *,
    sizes: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
) -> StepCost:
    """Return modelled step times, and plain steps, as ``profile`` would measure them."""
    times = [
        StepTime(batch, context, size, ms, ms, ms, repeats=0)
        for batch, context in itertools.product(batches, contexts)
        for size in (0, *sizes)
        for ms in [round(step_ms(device, shape, size, batch, context), 4)]
    ]
    machine = {"device": device.name, "dtype": "16-bit", "backbone": shape.name}
    return StepCost(tuple(times), machine, measured=False)


def step_ms(device: Device, shape: ModelShape, tree_size: int, batch: int, context: int) -> float:
    """Return the modelled time of one step; a ``tree_size`` of 0 is plain decode."""
    products = list(backbone_products(shape, max(tree_size, 1), batch, context))
    if tree_size > 1:
        products += head_products(shape, batch)
    return 1000 * sum(_seconds(device, product) for product in products)


def backbone_products(shape: ModelShape, n: int, batch: int, context: int) -> Iterator[Product]:
    """Yield the products of one forward call on ``n`` rows of each sequence."""
    rows, layers = batch * n, shape.num_layers
    width = shape.num_attention_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    yield Product(rows, shape.hidden_size, width, layers)
    yield Product(rows, shape.hidden_size, kv_width, 2 * layers)
    yield Product(n, width, context + n, 2 * layers, batch, kv_width)  # scores; values
    yield Product(rows, width, shape.hidden_size, layers)
    yield Product(rows, shape.hidden_size, shape.intermediate_size, 2 * layers)
    yield Product(rows, shape.intermediate_size, shape.hidden_size, layers)
    yield Product(rows, shape.hidden_size, shape.vocab_size)


def head_products(shape: ModelShape, batch: int) -> Iterator[Product]:
    """Yield the products of drafting: every head at one node of each sequence."""
    yield Product(batch, shape.hidden_size, shape.hidden_size, shape.num_heads * shape.num_blocks)
    if shape.own_lm_heads:
        yield Product(batch, shape.hidden_size, shape.vocab_size, shape.num_heads)
    else:  # one read of the weights for all
        yield Product(batch * shape.num_heads, shape.hidden_size, shape.vocab_size)


def _seconds(device: Device, product: Product) -> float:
    p = product
    padded = math.ceil(p.rows / device.tile_rows) * device.tile_rows
    operations = 2 * max(p.sequences, 1) * padded * p.inner * p.outer
    if p.sequences:  # attention keeps its scores on the chip, and reads each key or value once
        moved = p.sequences * (p.rows * p.inner + p.outer * p.kv_width)
    else:
        moved = p.inner * p.outer + p.rows * (p.inner + p.outer)
    return p.repeats * max(
        operations / (1e12 * device.tflops),
        _BYTES * moved / (1e9 * device.gb_per_s),
        1e-6 * device.launch_us,
    )
