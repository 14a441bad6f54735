"""Several processes learn what one learns."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, own_answers, random_heads, tiny_backbone

from treeopt.formats.heads import OWN
from treeopt.training.loop import Epoch, Plan, Task, fit
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.medusa2 import Adapter, Answers, JointTask
from treeopt.training.processes import ALONE, Processes
from treeopt.training.states import compute_states


def trained(kind: str, folder: Path, processes: Processes) -> list[Epoch]:
    """Train for two epochs; an odd batch size deals unlike shares."""
    backbone = tiny_backbone()
    rows = own_answers(backbone, PROMPTS[:7], 20)
    states = compute_states(backbone, rows, 2, folder / f"states-{processes.count}", processes, 64)
    task: Task
    if kind == "heads":
        task, size = HeadsTask(random_heads(backbone, 2, OWN), states, states, 0.02), 33
    else:
        answers = Answers(rows, states)
        task, size = (
            JointTask(
                backbone,
                random_heads(backbone, 2),
                answers,
                answers,
                heads_rate=0.02,
                backbone_rate=0.01,
                seed=0,
                adapter=Adapter(4, 8, dropout=0.0),
            ),
            3,
        )
    return list(fit(task, Plan(2, size, checkpoint=folder / "run", processes=processes)))


def work(index: int, kind: str, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    processes = Processes.launched()
    assert (processes.index, processes.count) == (index, 2)
    epochs = trained(kind, folder, processes)
    (folder / f"epochs-{index}").write_bytes(pickle.dumps(epochs))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["heads", "backbone"])
def test_two_processes_have_the_loss_curve_of_one(tmp_path, kind):
    if kind == "backbone":
        pytest.importorskip("peft", reason="peft is an optional extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (kind, tmp_path, port), nprocs=2)
    first, second = (pickle.loads((tmp_path / f"epochs-{i}").read_bytes()) for i in range(2))
    alone = trained(kind, tmp_path, ALONE)
    assert second == []  # the first process alone scores and tells
    for ours, theirs in zip(first, alone, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.score.top5 == pytest.approx(theirs.score.top5, abs=0.02)
    assert not (tmp_path / "run").exists()


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Processes.launched() == ALONE
    parameter = torch.nn.Parameter(torch.zeros(2))
    counters = torch.tensor([3.0])
    ALONE.sum_([parameter], counters)
    assert parameter.grad is None
    assert counters.item() == 3
