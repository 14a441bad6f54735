"""Where an artefact came from: library versions and the time."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version


def library_versions() -> dict[str, str]:
    """Return the versions that numbers depend on, without importing the libraries."""
    return {name: _version(name) for name in ("treeopt", "torch", "transformers")}


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
