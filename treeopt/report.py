"""What a validation measured: counts and times per prompt; ratios are computed, never stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.replay import Documents, Interval, bootstrap

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Mismatch:
    """The first token at which tree decoding and plain decoding of one prompt differ.

    position: index into the answer. expected, got: token ids of plain and tree decoding.
    gap: how far ``got``'s logit lies below ``expected``'s in the plain decode's own logits.
    is_near_tie: whether rounding in the dtype in use explains the gap.
    expected_text, got_text: both answers up to there and a little beyond.
    """

    document: int
    position: int
    expected: int
    got: int
    gap: float
    is_near_tie: bool
    expected_text: str = ""
    got_text: str = ""


@dataclass(frozen=True)
class DecodedPrompt:
    """One prompt, decoded in turn by each side; times are seconds of decoding, prefill apart.

    num_tokens: tokens the tree decode emitted after the first, which prefill gives.
    num_accepted: draft tokens accepted in each of its steps.
    tree_s, plain_s, generate_s: decode time of ``num_tokens``, ``num_plain``, ``num_generate``.
    phase_s: where the tree decode's time went.
    nodes, step_s: the deepest accepted node and the seconds of each of its steps.
    num_prompt: tokens of the prompt.
    """

    num_tokens: int
    num_plain: int
    num_generate: int
    num_accepted: tuple[int, ...]
    tree_s: float
    plain_s: float
    generate_s: float
    prefill_s: float
    phase_s: dict[str, float]
    nodes: tuple[int, ...] = ()
    step_s: tuple[float, ...] = ()
    num_prompt: int = 0


@dataclass(frozen=True)
class DecodeReport:
    """Tree decoding against this decoder's plain decoding and transformers' ``generate``.

    The sides took turns on the same prompts in one process. ``machine`` holds device, dtype,
    threads and versions.
    """

    tree_size: int
    prompts: tuple[DecodedPrompt, ...]
    mismatches: tuple[Mismatch, ...]
    machine: dict[str, Any]

    @property
    def acceptance_length(self) -> Interval:
        """Tokens emitted per step, root included, over all prompts."""
        tokens = self._column(lambda prompt: prompt.num_tokens)
        steps = self._column(lambda prompt: len(prompt.num_accepted))
        return self._interval(lambda rows: tokens[rows].sum() / steps[rows].sum())

    @property
    def context(self) -> float:
        """Tokens before a step, halfway through an answer, as a mean over prompts."""
        return float(
            np.mean([prompt.num_prompt + prompt.num_tokens / 2 for prompt in self.prompts])
        )

    @property
    def num_accepted_mean(self) -> float:
        """Draft tokens accepted per step, root not counted."""
        return float(np.mean([count for p in self.prompts for count in p.num_accepted]))

    @property
    def tokens_per_s(self) -> float:
        """Median over prompts of the tree decode's tokens/s."""
        return float(np.median(self._rates("tree")))

    @property
    def plain_tokens_per_s(self) -> float:
        """Median over prompts of plain decoding's tokens/s."""
        return float(np.median(self._rates("plain")))

    @property
    def generate_tokens_per_s(self) -> float:
        """Median over prompts of the tokens/s of transformers' ``generate``."""
        return float(np.median(self._rates("generate")))

    @property
    def speedup_vs_plain(self) -> Interval:
        """Median over prompts of tree tokens/s over plain tokens/s, pair by pair."""
        return self._median(self._rates("tree") / self._rates("plain"))

    @property
    def speedup_vs_generate(self) -> Interval:
        """Median over prompts of tree tokens/s over ``generate`` tokens/s, pair by pair."""
        return self._median(self._rates("tree") / self._rates("generate"))

    @property
    def overhead(self) -> Interval:
        """Median over prompts of a tree step's time over a plain step's, pair by pair."""
        steps = self._column(lambda prompt: len(prompt.num_accepted))
        step_s = self._column(lambda prompt: prompt.tree_s) / steps
        return self._median(step_s * self._rates("plain"))

    @property
    def outside_model_share(self) -> float:
        """Share of the tree decode's time that no model call explains."""
        inside = sum(p.phase_s["draft"] + p.phase_s["verify"] for p in self.prompts)
        return 1 - inside / sum(prompt.tree_s for prompt in self.prompts)

    @property
    def accepted_by_depth(self) -> list[float]:
        """Share of steps that accept a node at depth 1, 2, … or deeper."""
        counts = np.array([count for prompt in self.prompts for count in prompt.num_accepted])
        return [float((counts >= depth).mean()) for depth in range(1, int(counts.max()) + 1)]

    @property
    def stops_by_node(self) -> list[float]:
        """Share of steps whose deepest accepted node is node 0, 1, …: at least [tree_size]."""
        nodes = [node for prompt in self.prompts for node in prompt.nodes]
        return list(np.bincount(nodes, minlength=self.tree_size) / max(len(nodes), 1))

    def details(self) -> dict[str, Any]:
        """Return where the time went and what was accepted where; times in ms per step."""
        steps = [seconds for prompt in self.prompts for seconds in prompt.step_s]
        phases = {
            f"{phase}_ms": 1000 * sum(p.phase_s[phase] for p in self.prompts) / len(steps)
            for phase in self.prompts[0].phase_s
        }
        tail = np.quantile(steps, [0.5, 0.95, 0.99])
        return {
            "prefill_ms": 1000 * float(np.mean([prompt.prefill_s for prompt in self.prompts])),
            **phases,
            **{f"step_p{p}_ms": 1000 * float(t) for p, t in zip((50, 95, 99), tail, strict=True)},
            "outside_model_share": self.outside_model_share,
            "accepted_by_depth": self.accepted_by_depth,
            "stops_by_node": self.stops_by_node,
        }

    @property
    def equal(self) -> bool:
        """Whether every answer equals plain decoding, or first differs at a near-tie."""
        return all(mismatch.is_near_tie for mismatch in self.mismatches)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers under the names of ``treeopt validate --json``."""
        first = next((m for m in self.mismatches if not m.is_near_tie), None)
        value: dict[str, Any] = {
            "tree_size": self.tree_size,
            "acceptance_length": round(self.acceptance_length.value, 4),
            "num_accepted_mean": round(self.num_accepted_mean, 4),
        }
        for name in ("overhead", "speedup_vs_plain", "speedup_vs_generate"):
            interval: Interval = getattr(self, name)
            value[name] = round(interval.value, 4)
            value[f"{name}_low"] = round(interval.low, 4)
            value[f"{name}_high"] = round(interval.high, 4)
        for name in ("tokens_per_s", "plain_tokens_per_s", "generate_tokens_per_s"):
            value[name] = round(getattr(self, name), 2)
        return value | {
            "equal": self.equal,
            "first_mismatch": vars(first) if first else None,
            "near_ties": sum(mismatch.is_near_tie for mismatch in self.mismatches),
            "documents": len(self.prompts),
            "tokens": sum(prompt.num_tokens for prompt in self.prompts),
            **{key: self.machine[key] for key in ("device", "dtype", "threads")},
        }

    def _rates(self, side: str) -> FloatArray:
        """Return the tokens/s of one side: float64 [prompts]."""
        counts = {"tree": "num_tokens", "plain": "num_plain", "generate": "num_generate"}
        seconds = self._column(lambda prompt: getattr(prompt, f"{side}_s"))
        return self._column(lambda prompt: getattr(prompt, counts[side])) / seconds

    def _column(self, value: Callable[[DecodedPrompt], float]) -> FloatArray:
        return np.array([value(prompt) for prompt in self.prompts], dtype=np.float64)

    def _median(self, pairs: FloatArray) -> Interval:
        return self._interval(lambda rows: float(np.median(pairs[rows])))

    def _interval(self, statistic: Callable[[Documents], float]) -> Interval:
        return bootstrap(statistic, len(self.prompts))
