"""Other engines on the same prompts, each in a Python environment of its own (`make peers`).

A peer is a script beside this file. It reads one JSON object from stdin: `model` (a GGUF file),
`prompts` (token ids), `max_new_tokens` and `threads`. It prints one JSON object:
`weights`, `version`, and `answers`: per prompt `num_tokens` and `decode_s`, prefill apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent.parent / ".venv-peers"
NAMES = ("llama_cpp",)


def run_peer(name: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the peer measured; None, with the reason on stderr, where it cannot run."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        print(f"{name} skipped: no environment at {python}; `make peers` makes it", file=sys.stderr)
        return None
    done = subprocess.run(
        [python, "-I", HERE / f"{name}.py"],
        input=json.dumps(request), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{name} skipped: exit {done.returncode}, {reason}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
