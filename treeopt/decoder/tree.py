"""Tree decoding: draft with the heads, verify in one backbone call, accept, for many rows at once.

Legend: ``B`` rows (sequences), ``N`` tree size, ``K`` tree depth, ``R`` ranks the tree uses, ``d``
hidden size, ``V`` vocabulary size. Row b of a verify call holds the N nodes of sequence b. A
dynamic tree chooses them from the ``U`` nodes of its universe; a static one is all of it, U = N.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from treeopt.decoder import rules
from treeopt.decoder.choice import Choice, Chooser
from treeopt.decoder.plain import greedy, prefill, room_for
from treeopt.decoder.rules import Accepted, Greedy, Rule, Sampling, TreeShape, Typical
from treeopt.dynamic import DynamicTree
from treeopt.errors import DataError, TreeoptError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.cache import RaggedCache
from treeopt.models.candidates import top_candidates
from treeopt.models.heads import MedusaHeads
from treeopt.preset import Preset
from treeopt.tree import Tree

PHASES = ("draft", "verify", "accept", "gather")

Stop = Callable[[int, int], bool]

_SEED_STRIDE = 1_000_003  # sequences of one call get seeds this far apart


@dataclass
class StepLog:
    """What the steps of one decode did, for reports; times are taken only where there is a log.

    num_accepted: draft tokens accepted per step.
    nodes: the deepest accepted node per step.
    step_s: seconds per step.
    phase_s: seconds per phase, summed over steps.
    """

    num_accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass(frozen=True)
class Emitted:
    """What a call on many prompts emits next: tokens of one prompt, or why it has to end.

    prompt: index of the prompt.
    tokens: the next tokens of its answer; empty with an error.
    ended: whether these are its last.
    error: set when this prompt cannot be answered, or not to its end; others go on.
    """

    prompt: int
    tokens: list[int]
    ended: bool
    error: TreeoptError | None = None


@dataclass
class _Sequence:
    """One prompt while it is decoded. ``length``: tokens in the cache; ``log``: its own counts."""

    prompt: int
    length: int
    remaining: int
    generator: torch.Generator
    log: StepLog


@dataclass
class Batch:
    """The rows that decode together: their cache, states [B, d], next roots int64 [B]."""

    cache: RaggedCache
    states: Tensor
    roots: Tensor


@dataclass(frozen=True)
class Step:
    """What one step did in one row: draft tokens accepted, the token that follows, its node.

    token: the next root; ``valid`` is False where its logits held a value that is not a number.
    """

    accepted: list[int]
    token: int
    node: int
    valid: bool


class TreeDecoder:
    """Decodes with a static or a dynamic tree under one acceptance rule.

    Everything that does not depend on the text is made once: where nodes stand, what they see,
    and where in the heads' lists each node's token is.

    tree: the tree, of a dynamic one the universe. tree_size: rows of a verify call.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads,
        tree: Tree | DynamicTree,
        rule: Rule | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare ``tree`` for ``backbone`` and ``heads``; the default rule is greedy.

        Raises:
            TreeError: the tree is deeper than the heads or uses ranks beyond the vocabulary.
            DataError: a dynamic tree under a rule that needs a static one.
        """
        tree.check_fits(heads.num_heads, backbone.vocab_size)
        self.rule: Rule = rule or Greedy()
        self.tree_size, device = tree.tree_size, backbone.device
        self._chooser: Chooser | None = None
        if isinstance(tree, DynamicTree):
            if not _chooses_trees(self.rule):
                raise DataError(
                    "a dynamic tree decodes greedily or samples with top candidates; typical "
                    "acceptance and sampled candidates need a static one"
                )
            self._chooser, tree = Chooser(tree, device), tree.universe
        self.backbone, self.heads, self.tree, self.seed = backbone, heads, tree, seed
        self.shape = TreeShape.of(tree, device)
        ranks = tree.sibling_indices if self._samples_candidates else tree.ranks
        self.num_candidates = int(ranks.max()) + 1
        slots = (tree.depths[1:] - 1) * self.num_candidates + ranks[1:]
        self.slots = torch.tensor(slots, device=device)  # [U - 1] into [K, R], flattened
        self._visible = self._visibility()
        self._everything = Choice.of(
            torch.arange(tree.tree_size, device=device)[None], tree.tree_size
        )

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, log: StepLog | None = None
    ) -> Iterator[list[int]]:
        """Yield the tokens that each step emits after ``prompt``; the first one from prefill.

        Under the greedy rule the tokens are those of ``decode_plain``, and stop where it stops.
        """
        logs = None if log is None else [log]
        for emitted in self.decode_many([prompt], max_new_tokens, 1, logs):
            if emitted.error:
                raise emitted.error
            yield emitted.tokens

    @torch.inference_mode()
    def decode_many(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        batch_size: int,
        logs: Sequence[StepLog] | None = None,
        stop: Stop | None = None,
    ) -> Iterator[Emitted]:
        """Yield what each prompt emits, step by step, ``batch_size`` prompts at a time.

        A prompt that ends makes room for the next one at once. Every prompt gets the tokens that
        it gets alone; with a sampling rule they depend on the seed and its index only.

        Args:
            logs: one per prompt, filled on the way.
            stop: called with (prompt, token) for each token in turn; True ends the answer with it.
        """
        stop = stop or (lambda prompt, token: False)
        waiting = deque(enumerate(prompts))
        longest = max(map(len, prompts), default=0)
        num_rows = max(1, min(batch_size, len(prompts)))
        batch = self.new_batch(longest + max_new_tokens, num_rows)
        rows: list[_Sequence | None] = [None] * num_rows
        while True:
            for row in (row for row, sequence in enumerate(rows) if sequence is None):
                rows[row] = yield from self._admit(batch, row, waiting, max_new_tokens, logs, stop)
            rows = self._compacted(batch, rows)
            live = [sequence for sequence in rows if sequence is not None]
            if not live:
                return
            batch.cache.length = max(sequence.length for sequence in live)
            clock = None if logs is None else _Clock(self.backbone.device)
            steps = self.step(batch, [None if s is None else s.generator for s in rows], clock)
            for row, (sequence, step) in enumerate(zip(rows, steps, strict=True)):
                if sequence is None:
                    continue
                emitted = self._emit(sequence, step, clock, stop)
                if emitted.ended:
                    rows[row] = None
                yield emitted

    def new_batch(self, num_tokens: int, num_rows: int) -> Batch:
        """Return empty rows for ``num_tokens`` of text each, and scratch room for a verify call."""
        backbone = self.backbone
        capacity = min(num_tokens, attention_limit(backbone.model.config)) + self.tree_size
        return Batch(
            backbone.new_ragged_cache(capacity, num_rows),
            torch.zeros(
                (num_rows, backbone.hidden_size), dtype=backbone.dtype, device=backbone.device
            ),
            torch.zeros(num_rows, dtype=torch.int64, device=backbone.device),
        )

    def fill(
        self, batch: Batch, row: int, prompt: Sequence[int], generator: torch.Generator
    ) -> int:
        """Read ``prompt`` into an empty row; return the first token after it.

        Raises:
            DataError: the logits hold a value that is not a number.
        """
        state = prefill(self.backbone, batch.cache.row(row), prompt)
        batch.cache.set_length(row, len(prompt))
        logits = self.backbone.logits(state)
        if logits.isnan().any():
            raise _not_a_number(0)
        if isinstance(self.rule, Sampling):
            uniforms = torch.rand(1, generator=generator).to(logits.device)
            token = rules.draw(self._target_probs(logits)[None], uniforms)[0]
        else:
            token = greedy(logits)
        batch.states[row], batch.roots[row] = state, token
        return int(token)

    def step(
        self,
        batch: Batch,
        generators: Sequence[torch.Generator | None] = (None,),
        clock: _Clock | None = None,
    ) -> list[Step]:
        """Do one step in every row; return what each accepted. ``batch`` becomes the next one's."""
        lap = clock.lap if clock else lambda phase: None
        tokens, draft_probs, choice = self.draft(batch, generators)
        lap("draft")
        states, logits = self.verify(batch.cache, tokens, choice)
        lap("verify")
        accepted = self.accept(tokens, logits, draft_probs, generators, choice)
        paths = self.shape.paths[accepted.node][:, : self.tree_size]  # no path is longer
        counts = self.shape.depths[accepted.node] + 1
        places = choice.place_of(paths)
        index = torch.arange(len(counts), device=counts.device)
        last = index, choice.place_of(accepted.node[:, None])[:, 0]
        invalid = logits[last].isnan().any(-1)
        everything = _to_host(tokens, accepted, paths, invalid)  # the step's only copy to host
        lap("accept")
        batch.cache.keep(places, counts)
        batch.states, batch.roots = states[last], accepted.next_token
        lap("gather")
        depths = self.tree.depths
        return [
            Step(drafts[: depths[node]], token, node, not invalid)
            for *drafts, token, node, invalid in everything
        ]

    def draft(
        self, batch: Batch, generators: Sequence[torch.Generator | None] = (None,)
    ) -> tuple[Tensor, Tensor | None, Choice]:
        """Return the token of every node, int64 [B, U], and which nodes to verify.

        The second value is what sampled candidates were drawn from, float32 [B, K, V], else None.
        """
        roots, choice = batch.roots[:, None], self._everything
        if self.tree.depth == 0:
            return roots, None, choice
        logits = self.heads.logits(batch.states, self.tree.depth).transpose(0, 1)  # [B, K, V]
        if self._samples_candidates:
            probs = self._target_probs(logits)
            candidates = torch.stack(
                [
                    rules.sample_without_replacement(row, self.num_candidates, generator)
                    for row, generator in zip(probs, generators, strict=True)
                ]
            )
        else:
            probs = None
            flat = logits.flatten(0, 1)
            best, candidates = top_candidates(flat, self.num_candidates)
            if self._chooser:
                choice = self._chooser.choose(flat, best)
        drafts = candidates.reshape(len(roots), -1)[:, self.slots]
        tokens = torch.cat([roots, drafts], dim=1)
        return choice.without_others(tokens) if self._chooser else tokens, probs, choice

    def verify(
        self, cache: RaggedCache, tokens: Tensor, choice: Choice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the chosen of ``tokens`` [B, U] under the tree mask; by default all of them.

        Returns:
            states [B, N, d] and logits [B, N, V].
        """
        choice = choice or self._everything
        # Beyond the context nothing is emitted; the clamp keeps such nodes' places in range.
        last = attention_limit(self.backbone.model.config) - 1
        positions = (cache.lengths[:, None] + self.shape.depths[choice.nodes]).clamp(max=last)
        chosen = tokens.gather(1, choice.nodes.expand(len(tokens), -1))
        states = self.backbone.forward(chosen, cache, positions, self.mask(cache, choice))
        return states, self.backbone.logits(states)

    def accept(
        self,
        tokens: Tensor,
        logits: Tensor,
        draft_probs: Tensor | None = None,
        generators: Sequence[torch.Generator | None] = (None,),
        choice: Choice | None = None,
    ) -> Accepted:
        """Return the deepest accepted node of each row and the token that follows it."""
        rule, shape, choice = self.rule, self.shape, choice or self._everything
        if isinstance(rule, Greedy):
            predicted = choice.spread(greedy(logits))
            return rules.accept_matching(shape, tokens, predicted)
        if isinstance(rule, Typical):
            probs = rules.target_probs(logits, rule.temperature, 1.0, 0)
            return rules.accept_typical(shape, tokens, probs, rule)
        rows = torch.arange(len(tokens), device=tokens.device)

        def probs_at(nodes: Tensor) -> Tensor:
            return self._target_probs(logits[rows, choice.place_of(nodes[:, None])[:, 0]])

        if draft_probs is None:
            uniforms = _uniforms(generators, self.tree.depth + 1, tokens.device)
            return rules.accept_drawn(shape, tokens, probs_at, uniforms)
        uniforms = _uniforms(generators, self.tree.tree_size + 1, tokens.device)
        return rules.accept_sampled(shape, tokens, probs_at, draft_probs, uniforms)

    def mask(self, cache: RaggedCache, choice: Choice | None = None) -> Tensor:
        """Return the additive mask [B, 1, N, cache.length + N].

        A node sees its row's text and, of the columns behind it, its ancestors'.
        """
        nodes, size = (choice or self._everything).nodes, self.tree_size
        columns = torch.arange(cache.length + size, device=cache.lengths.device)
        behind = (columns - cache.lengths[:, None]).clamp(min=-1, max=size) + 1  # [B, columns]
        seen = functional.pad(nodes + 1, (1, 0))  # the text, the chosen nodes, and the rest
        seen = functional.pad(seen, (0, 1), value=self.tree.tree_size + 1)
        seen = seen.expand(len(behind), -1).gather(1, behind)
        return self._visible[nodes[:, :, None], seen[:, None]][:, None]

    @property
    def _samples_candidates(self) -> bool:
        return isinstance(self.rule, Sampling) and self.rule.candidates == "sampled"

    def _target_probs(self, logits: Tensor) -> Tensor:
        assert isinstance(self.rule, Sampling)
        rule = self.rule
        return rules.target_probs(logits, rule.temperature, rule.top_p, rule.top_k)

    def _visibility(self) -> Tensor:
        """Return what each node sees: additive [U, U + 2], for the text, U nodes, and the rest."""
        backbone, size = self.backbone, self.tree.tree_size
        table = torch.zeros((size, size + 2), dtype=backbone.dtype, device=backbone.device)
        table[:, 1:-1][~self.shape.ancestors] = backbone.masked
        table[:, -1] = backbone.masked
        return table

    def _admit(
        self,
        batch: Batch,
        row: int,
        waiting: deque[tuple[int, Sequence[int]]],
        max_new_tokens: int,
        logs: Sequence[StepLog] | None,
        stop: Stop,
    ) -> Generator[Emitted, None, _Sequence | None]:
        """Fill ``row`` with the next prompt that needs steps; yield first tokens and errors."""
        while waiting:
            index, prompt = waiting.popleft()
            generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + index)
            try:
                remaining = room_for(self.backbone, prompt, max_new_tokens)
                token = self.fill(batch, row, prompt, generator)
            except DataError as error:
                yield Emitted(index, [], True, error)
                continue
            ended = remaining == 1 or self._ends(index, token, stop)
            yield Emitted(index, [token], ended)
            if not ended:
                log = logs[index] if logs else StepLog()
                return _Sequence(index, len(prompt), remaining - 1, generator, log)
        batch.cache.set_length(row, 0)
        return None

    def _compacted(self, batch: Batch, rows: list[_Sequence | None]) -> list[_Sequence | None]:
        """Drop rows for which no prompt waits, once they are a fifth: dropping copies the cache."""
        live = [row for row, sequence in enumerate(rows) if sequence is not None]
        if not live or len(live) > 0.8 * len(rows):
            return rows
        keep = torch.tensor(live, device=batch.roots.device)
        batch.cache.select(keep)
        batch.states, batch.roots = batch.states[keep], batch.roots[keep]
        return [rows[row] for row in live]

    def _ends(self, prompt: int, token: int, stop: Stop) -> bool:
        return stop(prompt, token) or token in self.backbone.eos_ids  # stop sees every token

    def _emit(self, sequence: _Sequence, step: Step, clock: _Clock | None, stop: Stop) -> Emitted:
        """Book a step of one sequence; return its tokens up to the end token or the limit."""
        log, position = sequence.log, len(sequence.log.num_accepted)
        if not step.valid:
            return Emitted(sequence.prompt, [], True, _not_a_number(position + 1))
        tokens = [*step.accepted, step.token][: sequence.remaining]
        ended = len(tokens) == sequence.remaining
        for index, token in enumerate(tokens):
            if self._ends(sequence.prompt, token, stop):
                tokens, ended = tokens[: index + 1], True
                break
        sequence.length += len(step.accepted) + 1
        sequence.remaining -= len(tokens)
        log.num_accepted.append(min(len(step.accepted), len(tokens)))
        log.nodes.append(step.node)
        if clock:
            clock.book(log)
        return Emitted(sequence.prompt, tokens, ended)


def tree_for(preset: Preset, rule: Rule) -> Tree | DynamicTree:
    """Return what decodes ``preset`` under ``rule``: its static tree where a dynamic one cannot."""
    return preset.draft_tree if _chooses_trees(rule) else preset.tree


def _chooses_trees(rule: Rule) -> bool:
    """Return whether ``rule`` goes with a dynamic tree.

    Rejection of sampled candidates is lossless only where the tree does not depend on the draws,
    and typical acceptance is not what its maps are calibrated for.
    """
    return isinstance(rule, Greedy) or (isinstance(rule, Sampling) and rule.candidates == "top")


def _to_host(tokens: Tensor, accepted: Accepted, paths: Tensor, invalid: Tensor) -> list[list[int]]:
    """Return per row: tokens on the accepted path, the next token, the node, "not a number"."""
    columns = [accepted.next_token, accepted.node, invalid.long()]
    on_path = tokens.gather(1, paths)[:, 1:]
    return torch.cat([on_path, torch.stack(columns, dim=1)], dim=1).tolist()


def _uniforms(
    generators: Sequence[torch.Generator | None], count: int, device: torch.device
) -> Tensor:
    """Return uniform numbers in [0, 1), float32 [B, count], each row from its own generator."""
    return torch.stack([torch.rand(count, generator=g) for g in generators]).to(device)


def _not_a_number(step: int) -> DataError:
    return DataError(
        f"step {step}: the backbone's logits are not numbers; its weights are damaged, or they "
        "overflow in this dtype"
    )


class _Clock:
    """Times the phases of one step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase_s: dict[str, float] = {}
        self.start = self.last = self._now()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.phase_s[phase] = now - self.last
        self.last = now

    def book(self, log: StepLog) -> None:
        """Add the step to ``log``."""
        log.step_s.append(self.last - self.start)
        for phase, seconds in self.phase_s.items():
            log.phase_s[phase] += seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
