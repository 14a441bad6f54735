"""What every printed number depends on, in one line."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

from treeopt.provenance import library_versions


def conditions(machine: dict[str, Any] | None = None, **more: Any) -> str:
    """Return commit, versions, device and ``more`` as one line."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    known = machine or {"device": platform.machine(), **library_versions()}
    shown = {key: value for key, value in known.items() if not key.endswith("sha256")}
    return ", ".join(f"{key} {value}" for key, value in {"commit": commit, **shown, **more}.items())
