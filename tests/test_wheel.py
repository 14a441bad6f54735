"""The wheel, installed in a clean environment and run from another directory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_every_module_and_preset(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("treeopt", "calibration", "presets"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".jsonl", ".safetensors") or file.name == "py.typed":
                assert str(file.relative_to(ROOT)) in names
    assert "cli.py" in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"treeopt", "calibration", "presets", "cli.py"}


def test_installed_wheel_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True)
    # The dependencies are the ones at hand: a path file shows them without our editable install.
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "table.json").write_text('{"kind": "cumulative", "heads": [[0.5, 0.7], [0.4]]}')

    def run(*arguments: str) -> str:
        command = [environment / "bin" / "treeopt", *arguments]
        result = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "calibrate" in run("--help")
    run("build", "--accuracy", "table.json", "--budget", "4", "--out", "tree.yaml")
    assert "4 rows, 2 deep" in run("show", "tree.yaml")
    assert "64 rows" in run("show", "medusa-mc-sim-7b-63")
    where = subprocess.run(
        [python, "-c", "import treeopt, cli; print(treeopt.__file__, cli.__file__)"],
        cwd=elsewhere, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert str(ROOT) not in where
