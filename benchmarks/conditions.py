"""What every printed number depends on, in one line."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

from treeopt.provenance import library_versions

_GIT = ("git", "describe", "--always", "--dirty", "--abbrev=10")
# Read at once: when the numbers are printed, other code may be checked out than ran.
_COMMIT = subprocess.run(_GIT, capture_output=True, text=True, check=False).stdout.strip()


def conditions(machine: dict[str, Any] | None = None, **more: Any) -> str:
    """Return commit, versions, device and ``more`` as one line."""
    known = machine or {"device": platform.machine(), **library_versions()}
    shown = {key: value for key, value in known.items() if not key.endswith("sha256")}
    return ", ".join(
        f"{key} {value}" for key, value in {"commit": _COMMIT, **shown, **more}.items()
    )
