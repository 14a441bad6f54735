"""The decoder for library users: load a preset, ``generate`` texts, ``stream`` one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treeopt.decoder.rules import Rule, rule_from
from treeopt.decoder.stream import TextStream
from treeopt.decoder.tree import TreeDecoder, tree_for
from treeopt.errors import PresetError
from treeopt.models.backbone import Backbone, Message, load_backbone
from treeopt.models.heads import MedusaHeads, load_heads
from treeopt.preset import Preset, load_preset

Prompt = str | list[Message]


class Decoder:
    """A backbone, its heads, a tree and an acceptance rule, from prompts to texts."""

    def __init__(
        self,
        preset: Preset | str | Path,
        backbone: Backbone | None = None,
        heads: MedusaHeads | None = None,
        *,
        rule: Rule | None = None,
        seed: int = 0,
    ) -> None:
        """Load what ``preset`` names.

        Args:
            preset: a preset, its file, or a shipped one's name.
            backbone: by default the one that the preset names.
            heads: likewise.
            rule: by default the preset's own ``decoding`` section.
            seed: for the sampling rules.

        Raises:
            PresetError: the preset names no backbone or heads, and none are given.
        """
        self.preset = preset if isinstance(preset, Preset) else load_preset(preset)
        self.backbone = backbone or load_backbone(_named(self.preset, "backbone"))
        self.heads = heads or load_heads(_named(self.preset, "heads"), self.backbone)
        self.rule = rule or rule_from(self.preset.decoding)
        tree = tree_for(self.preset, self.rule)
        self.tree_decoder = TreeDecoder(self.backbone, self.heads, tree, self.rule, seed)

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 256, batch_size: int = 8
    ) -> list[str]:
        """Return the answers to ``prompts`` (texts or chats), in their order.

        Raises:
            DataError: a prompt is empty or leaves no room in the context.
        """
        encoded = [self.backbone.encode(as_messages(prompt)) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        for emitted in self.tree_decoder.decode_many(encoded, max_new_tokens, batch_size):
            if emitted.error:
                raise emitted.error
            answers[emitted.prompt] += emitted.tokens
        return [self.backbone.decode(answer) for answer in answers]

    def stream(self, prompt: Prompt, max_new_tokens: int = 256) -> TextStream:
        """Return the answer to one prompt, piece by piece."""
        encoded = self.backbone.encode(as_messages(prompt))
        return TextStream(self.tree_decoder, encoded, max_new_tokens)


def as_messages(prompt: Prompt) -> list[Message]:
    """Return a text as the chat of one user message; a chat as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _named(preset: Preset, key: str) -> str:
    section = preset.backbone if key == "backbone" else preset.heads
    if section is None:
        raise PresetError(f"preset {preset.name} names no {key}; pass {key}=")
    return str(section["id"])
