"""Tree decoding inside transformers: ``generate(..., custom_generate=treeopt_decoder(preset))``.

Whatever ``generate`` offers and tree decoding cannot honour is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import generation

from treeopt.decoder.rules import Greedy, Rule, Sampling
from treeopt.decoder.tree import TreeDecoder, tree_for
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone, check_rows, check_verifiable, id_set
from treeopt.models.heads import load_heads
from treeopt.preset import Preset, load_preset

# What the rule itself does, or stops by itself; any other processor would have to see every node.
_KNOWN_PROCESSORS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
_KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
# Setting -> the values that leave it off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


def treeopt_decoder(
    preset: Preset | str | Path, *, heads: str | Path | None = None, seed: int = 0
) -> Callable[..., Any]:
    """Return a decoding loop for transformers' ``generate`` that decodes with a preset's tree.

    Args:
        preset: a preset, its file, or a shipped one's name.
        heads: a head checkpoint; by default the one that the preset names.
        seed: for ``do_sample=True``.

    Raises:
        DataError: the preset names no heads and none are given.
    """
    loaded = preset if isinstance(preset, Preset) else load_preset(preset)
    spec = heads or (loaded.heads or {}).get("id")
    if spec is None:
        raise DataError(f"preset {loaded.name} names no heads; pass heads=")
    ready: dict[int, tuple[Backbone, Any]] = {}  # models met so far, by identity

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        streamer = _streamer_of_caller()
        rule = _rule(generation_config, logits_processor)
        if id(model) not in ready:
            check_verifiable(model.config)
            backbone = Backbone(model.name_or_path, "", model, None, frozenset())
            check_rows(backbone)
            ready[id(model)] = backbone, load_heads(spec, backbone)
        known, known_heads = ready[id(model)]
        backbone = replace(known, eos_ids=id_set(generation_config.eos_token_id))
        decoder = TreeDecoder(backbone, known_heads, tree_for(loaded, rule), rule, seed)
        answers = _answers(decoder, input_ids, stopping_criteria, generation_config, streamer,
                           model_kwargs.get("attention_mask"))  # fmt: skip
        sequences = _padded(input_ids, answers, generation_config)
        if generation_config.return_dict_in_generate:
            return generation.GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    return decode


def _rule(config: Any, processors: Any) -> Rule:
    """Return the acceptance rule that ``config`` asks for.

    Raises:
        DataError: it asks for what tree decoding cannot honour.
    """
    for name, off in _UNSUPPORTED.items():
        if (value := getattr(config, name, None)) not in off:
            raise DataError(f"tree decoding cannot honour {name}={value}; leave it out")
    for processor in processors:
        if (name := type(processor).__name__) not in _KNOWN_PROCESSORS:
            raise DataError(
                f"tree decoding cannot honour the logits processor {name}: it depends on the order "
                "in which tokens are emitted; temperature, top_k and top_p are supported"
            )
    if not config.do_sample:
        return Greedy()
    settings = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
    }
    return Sampling(**{name: value for name, value in settings.items() if value is not None})


def _answers(
    decoder: TreeDecoder,
    input_ids: Tensor,
    criteria: Any,
    config: Any,
    streamer: Any,
    attention_mask: Tensor | None,
) -> list[list[int]]:
    """Return the answer to each row of ``input_ids`` [B, n], streamed on the way."""
    if streamer is not None and len(input_ids) > 1:
        raise DataError(f"a streamer shows one answer; {len(input_ids)} prompts were given")
    # Padding, on either side, is not part of the prompt.
    shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = [row[keep].tolist() for row, keep in zip(input_ids, shown.bool(), strict=True)]
    own = [c for c in criteria if type(c).__name__ not in _KNOWN_CRITERIA]
    answers: list[list[int]] = [[] for _ in rows]

    def stop(prompt: int, token: int) -> bool:
        answers[prompt].append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if not own:
            return False
        so_far = torch.tensor([rows[prompt] + answers[prompt]], device=input_ids.device)
        return any(bool(torch.as_tensor(criterion(so_far, None)).all()) for criterion in own)

    num_new = config.max_length - input_ids.shape[1]
    for emitted in decoder.decode_many(rows, num_new, len(rows), stop=stop):
        if emitted.error:
            raise emitted.error
    if streamer is not None:
        streamer.end()
    return answers


def _padded(input_ids: Tensor, answers: list[list[int]], config: Any) -> Tensor:
    """Return prompts and answers as ``generate`` does: int64 [B, longest], padded on the right."""
    pad = config.pad_token_id
    if pad is None:
        pad = min(id_set(config.eos_token_id), default=0)
    longest = max(map(len, answers))
    padded = [answer + [pad] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)


def _streamer_of_caller() -> Any:
    """Return the ``streamer`` argument of the ``generate`` call that runs us.

    transformers (4.57 to 5.24) passes a callable everything but its streamer, which would then
    wait for ever; the calling frame still has it.
    """
    return sys._getframe(2).f_locals.get("streamer")
