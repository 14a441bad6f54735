"""Calibrate, build, validate and show candidate trees for Medusa-style heads.

The names here need no torch. Models, decoders and training live in ``treeopt.models``,
``treeopt.decoder`` and ``treeopt.training``.
"""

from treeopt.acceptance import IndependentAcceptance, JointAcceptance
from treeopt.cost import StepCost
from treeopt.errors import TreeoptError
from treeopt.preset import Preset, load_preset
from treeopt.replay import Replay, replay
from treeopt.report import DecodeReport
from treeopt.search import Ladder, grow, grow_contiguous
from treeopt.trace import RankTrace
from treeopt.tree import Tree

__all__ = [
    "DecodeReport",
    "IndependentAcceptance",
    "JointAcceptance",
    "Ladder",
    "Preset",
    "RankTrace",
    "Replay",
    "StepCost",
    "Tree",
    "TreeoptError",
    "grow",
    "grow_contiguous",
    "load_preset",
    "replay",
]
