"""Every error that treeopt raises on purpose.

    TreeoptError
    ├── TreeError         a tree that is not prefix-closed, or does not fit the heads
    ├── TableError        a table or chance maps whose numbers cannot be acceptance rates
    ├── TraceError        a calibration file that is damaged, too small, or made for something else
    ├── PresetError       a preset with a wrong, missing or unknown key
    ├── CostError         a step-cost file that is damaged or measured elsewhere
    ├── DataError         prompts, decoding settings or logits that cannot be worked with
    ├── ModelError        a backbone that cannot be loaded or that a tree mask cannot verify
    └── HeadsError        a head checkpoint with missing, extra or misshapen tensors

A message says what was wrong, the value found, and what would be right. The command line prints
it and exits with status 1; library callers catch ``TreeoptError``.
"""

from __future__ import annotations


class TreeoptError(Exception):
    """Base of every error that a user of treeopt can cause."""


class TreeError(TreeoptError):
    """A set of paths that is not a tree, or a tree that does not fit the heads."""


class TableError(TreeoptError):
    """A table or chance maps whose numbers cannot be acceptance rates."""


class TraceError(TreeoptError):
    """A calibration trace that is damaged, too small, or made for something else."""


class PresetError(TreeoptError):
    """A preset with a wrong, missing or unknown key."""


class CostError(TreeoptError):
    """A step-cost file that is damaged, or measured on another device."""


class DataError(TreeoptError):
    """A prompt file, a prompt, a decoding setting or logits that cannot be worked with."""


class ModelError(TreeoptError):
    """A backbone that cannot be loaded, or that a tree mask cannot verify."""


class HeadsError(TreeoptError):
    """A head checkpoint with missing, extra or misshapen tensors."""
