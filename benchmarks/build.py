"""How long the search takes: a tree of 64 rows, a ladder of 100,000 nodes, a tree without gaps, a
choice of size.

python -m benchmarks.build
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.conditions import conditions
from treeopt.acceptance import IndependentAcceptance, JointAcceptance
from treeopt.build import LADDER_SIZE, Request, preset_from_trace
from treeopt.cost import StepCost, StepTime
from treeopt.replay import replay
from treeopt.search import grow, grow_contiguous
from treeopt.trace import RankTrace

TARGET_64_MS, TARGET_LADDER_S = 5.0, 2.0
TARGET_AUTO_S, TARGET_AUTO_GB = 10.0, 1.0
NUM_CATEGORIES = 16
_NAMES = ("backbone", "backbone_sha256", "heads", "heads_sha256", "heads_layout", "data",
          "template_sha256")  # fmt: skip
NUM_SIZES = 35  # about as many as `treeopt profile` measures on a CPU


def rates(num_heads: int, num_ranks: int) -> np.ndarray:
    """Rates that fall with rank and head like those of real heads."""
    falling = np.arange(1, num_ranks + 1) ** -1.5
    return np.stack([0.9 / (k + 1) ** 0.3 * falling / falling.sum() for k in range(num_heads)])


def synthetic_trace(num_documents: int, length: int, num_heads: int, num_ranks: int) -> RankTrace:
    """A trace of independent draws from ``rates``; sizes are what matters here.

    Documents come from 16 categories in turn, each with heads right more or less often.
    """
    generator = np.random.default_rng(0)
    positions = num_documents * length
    ranks = np.full((positions, num_heads), -1, dtype=np.int16)
    place = np.arange(positions)
    left, category = length - 1 - place % length, place // length % NUM_CATEGORIES
    for head, row in enumerate(rates(num_heads, num_ranks)):
        shares = np.append(row, 1 - row.sum())
        drawn = generator.choice(num_ranks + 1, positions, p=shares)
        unlucky = generator.random(positions) < 0.5 * category / NUM_CATEGORIES
        drawn[(drawn == num_ranks) | (left <= head) | unlucky] = -1
        ranks[:, head] = drawn
    return RankTrace(
        ranks,
        np.zeros((positions, num_heads, num_ranks), dtype=np.float16),
        np.ones(positions, dtype=np.float16),
        np.zeros(positions, dtype=np.float16),
        np.arange(0, positions + 1, length),
        dict.fromkeys(_NAMES, "synthetic") | {"decoding": {"rule": "greedy"}},
    )


def seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def choose_size(file: Path) -> None:
    """``build --budget auto`` on the trace in ``file``, under a rising cost of many sizes."""
    sizes = np.unique(np.geomspace(1, 64, 3 * NUM_SIZES).astype(int))[:NUM_SIZES].tolist()
    times = [
        StepTime(1, context, size, ms, 0.99 * ms, 1.01 * ms, 15)
        for context in (256, 1024)
        for size in (0, *sizes)
        for ms in [30 + 0.9 * size + context / 100]
    ]
    request = Request(LADDER_SIZE)
    cost = StepCost(tuple(times), {})
    preset_from_trace(RankTrace.load(file), file, request, name="a", command="a", cost=cost)


def main() -> None:
    print(conditions())
    with tempfile.TemporaryDirectory() as folder:  # first: the peak of memory is the process's
        file = Path(folder) / "calibration.safetensors"
        synthetic_trace(7813, 128, 4, 32).save(file)
        started = time.process_time()
        took = seconds(lambda: choose_size(file), 1)
        cpu_s = time.process_time() - started
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"--budget auto, 1 million positions {took:.1f} s ({cpu_s:.1f} s of CPU time) of the "
        f"{TARGET_AUTO_S:.0f} s allowed, peak {peak_gb:.2f} of {TARGET_AUTO_GB:.0f} GB"
    )
    independent = IndependentAcceptance(rates(5, 50))
    trace = synthetic_trace(240, 128, 4, 32)
    joint = JointAcceptance(trace)
    for name, model in (("independent", independent), ("joint", joint)):
        took = 1000 * seconds(lambda model=model: grow(model, 64), 20)
        print(f"64 rows, {name:<12} {took:8.2f} ms   {took / TARGET_64_MS:.2f} of the 5 ms allowed")
    took = seconds(lambda: grow(independent, 100_001), 3)
    print(
        f"100,000 nodes, 5x50      {took:8.2f} s    {took / TARGET_LADDER_S:.2f} of the 2 s allowed"
    )
    took = 1000 * seconds(lambda: grow_contiguous(IndependentAcceptance(rates(10, 32)), 128), 5)
    print(f"128 rows without gaps, 10x32 {took:4.1f} ms")
    took = 1000 * seconds(lambda: JointAcceptance(trace), 3)
    print(f"joint counts of {trace.num_positions} positions {took:8.1f} ms")
    tree = grow(joint, 64).tree(64)
    took = seconds(lambda: replay(trace, tree), 5)
    print(f"replay with 64 rows      {trace.num_positions / took / 1e6:8.2f} million positions/s")


if __name__ == "__main__":
    main()
