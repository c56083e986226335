"""A run on several GPUs over NCCL, and FSDP2 and DDP with the tree: the weights of one GPU, byte for byte.

With one GPU, two ranks share it over gloo. Able to fail: torch's own reductions give other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import vocabulary_checks
from parallel.on_ranks import on_ranks
from parallel.test_updates import Model, trained
from safetensors.torch import load_file
from torch.distributed import ProcessGroup
from training.test_ranks import digest
from training.test_ranks_killed import check_kill
from training.tiny import settings_of
from training.torchrun import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPUS = torch.cuda.device_count()
MODEL = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
RUNS = {
    "grpo": ("train.minibatches=2", "loss.kl_coef=0.1", "rollout.prompts=6", "rollout.max_tokens=24"),
    "sft": ("train.batch_size=12", "warmup.examples=64"),
}


def run(ranks: int, algorithm: str, folder: Path, *words: str) -> Path:
    """The run folder of three steps on some ranks."""
    folder.mkdir()
    more = ("run.device=cuda", "train.leaves=8", "train.steps=3", "optimizer.lr=0.001", *RUNS[algorithm], *words)
    settings = settings_of(folder, *more, algorithm=algorithm, **MODEL)
    with open(folder / "out", "w") as out:
        assert torchrun(ranks, settings, folder, out).wait(500) == 0, (folder / "out").read_text()
    return folder / "run"


@pytest.mark.parametrize("algorithm", RUNS)
def test_runs(algorithm: str, tmp_path: Path, record: Callable[..., None]) -> None:
    one = run(1, algorithm, tmp_path / "1")
    expected, weights = digest(one), load_file(one / "model" / "model.safetensors").values()
    counts = [count for count in (2, 4, 8) if count <= max(2, GPUS)]
    for count in counts:
        assert digest(run(count, algorithm, tmp_path / str(count))) == expected, f"{count} ranks on {GPUS} GPUs"
    for shard in ("gradients", "weights"):
        assert digest(run(counts[-1], algorithm, tmp_path / shard, f"train.shard={shard}")) == expected, shard
    elements = (len(counts) + 2) * sum(weight.numel() for weight in weights)
    record(cases=len(counts) + 2, elements=elements, mismatches=0, model=f"tiny {algorithm}", gpus=GPUS)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, because ranks wait inside NCCL only there")
@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("phase", ("rollout", "backward", "saving"))
def test_killed(phase: str, rank: int, tmp_path: Path, record: Callable[..., None]) -> None:
    """kill -9 of a rank; the run is resumed on one GPU."""
    check_kill(tmp_path, phase, rank, "run.device=cuda")
    record(cases=1, elements=0, mismatches=0, model="tiny grpo", gpus=GPUS)


def updates(groups: dict[int, ProcessGroup]) -> dict[str, Any]:
    """SHA-256 of the weights after ten updates, by kind and number of ranks."""
    return {
        f"{kind} {'stock' if stock else 'tree'}": [trained(group, kind, 8, stock, "cuda") for group in groups.values()]
        for kind in ("fsdp2", "ddp")
        for stock in (False, True)
    }


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_updates(tmp_path: Path, record: Callable[..., None]) -> None:
    ranks = 4 if GPUS >= 4 else 2
    found = on_ranks(updates, tmp_path, ranks, "nccl")
    tree = {sha for rank in found for kind in ("fsdp2", "ddp") for sha in rank[f"{kind} tree"]}
    assert len(tree) == 1
    for kind in ("fsdp2", "ddp"):
        assert len(set(found[0][f"{kind} stock"])) > 1
    elements = 2 * len(found[0]["ddp tree"]) * sum(p.numel() for p in Model().parameters())
    record(cases=2 * len(found[0]["ddp tree"]), elements=elements, mismatches=0, model="tiny", gpus=GPUS)


def vocabularies(groups: dict[int, ProcessGroup]) -> int:
    """How many log-probabilities and gradients were compared on this rank."""
    for group in groups.values():
        vocabulary_checks.embedding(group, "cuda")
    return sum(vocabulary_checks.log_probabilities(group, "cuda", 20000) for group in groups.values())


def test_vocabularies(tmp_path: Path, record: Callable[..., None]) -> None:
    """A vocabulary split over ranks; the chains over its 20000 entries have three chunks."""
    ranks = 4 if GPUS >= 4 else 2
    compared = on_ranks(vocabularies, tmp_path, ranks, "nccl" if GPUS > 1 else "gloo")
    record(cases=ranks, elements=sum(compared), mismatches=0, model="head", gpus=GPUS)
