"""A run on 1, 2 and 4 ranks: equal weights, metrics, samples and evaluations; resumed on another number of ranks.

Able to fail: another number of leaves gives other weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parallel.on_ranks import on_ranks
from torch.distributed import ProcessGroup
from training.tiny import settings_of

from rlkernel.contract import MismatchError
from rlkernel.data.errors import InputError
from rlkernel.parallel.ranks import Ranks
from rlkernel.training import batch, policy_trainer
from rlkernel.training.config import resolve
from rlkernel.training.policy_trainer import minibatches
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import StoppedError, run_training

QUIET = ("train.leaves=4", "run.samples=8")
SUPERVISED = ("train.batch_size=6", "warmup.examples=32", "optimizer.lr=0.001")
RUNS: dict[str, tuple[str, ...]] = {
    # three prompts: with four ranks one has none, and a leaf stays empty
    "grpo": (
        "loss.kl_coef=0.1",
        "warmup.steps=2",
        "warmup.examples=32",
        "warmup.batch_size=6",
        "eval.every=2",
        "train.steps=3",
        "run.probe_rollouts=1",
    ),
    "grpo minibatches": ("train.minibatches=2", "rollout.prompts=5", "rollout.top_k=5"),
    "grpo int8": ("optimizer.states=int8", "advantages.mode=batch"),
    "grpo turns": ("rollout.environment=training.tiny:echo", "rollout.max_tokens=20", "rollout.stop=['1', '2', '3']"),
    "grpo one leaf": ("train.leaves=1",),
    "ppo": ("train.minibatches=2", "ppo.whiten_rewards=true"),
    "sft": SUPERVISED,
    "sft gradients": (*SUPERVISED, "train.shard=gradients"),
    "sft weights": (*SUPERVISED, "train.shard=weights"),
    "dpo": SUPERVISED,
    "reward": SUPERVISED,
}
RUNS["grpo gradients"] = (*RUNS["grpo"], "train.shard=gradients", "train.gradient_checkpointing=true")
RUNS["grpo weights"] = (*RUNS["grpo"], "train.shard=weights", "train.gradient_checkpointing=true")


def ranks_of(group: ProcessGroup) -> Ranks:
    return Ranks(rank=group.rank(), size=group.size(), group=group)


def digest(run: Path) -> dict[str, str]:
    """SHA-256 of what a run has computed, without times and memory."""
    found = {"weights": hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()}
    for name in ("metrics", "samples", "eval"):
        rows = [
            {k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per_s", "memory_mib"))}
            for row in read_jsonl(run / f"{name}.jsonl")
        ]
        found[name] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return found


def everything(groups: dict[int, ProcessGroup], folder: Path) -> dict[str, Any]:
    """Digests by kind of run and number of ranks, from rank 0."""
    found: dict[str, Any] = {}
    for kind, more in RUNS.items():
        for size, group in groups.items():
            if kind == "grpo one leaf" and size > 1:
                continue
            place = folder / f"{kind} {size}"
            if kind == "grpo minibatches":  # micro-batches of three sequences, of two, of one
                more = (*RUNS[kind], f"train.micro_batch_tokens={ {1: 50, 2: 35, 4: 20}[size] }")
            settings = settings_of(place, *QUIET, *more, algorithm=kind.split()[0])
            run = run_training(settings, ranks=ranks_of(group))
            if group.rank() == 0:
                found.setdefault(kind, {})[str(size)] = digest(run)
    return found


def resumed(groups: dict[int, ProcessGroup], folder: Path) -> dict[str, Any]:
    """The run "grpo" in parts: on two ranks and on four, each until one rank gets SIGTERM, and on a single one."""
    more = (*QUIET, *RUNS["grpo"])
    for size, signalled, shard in ((2, 1, "gradients"), (4, 3, "weights")):
        if size in groups:
            settings = settings_of(folder / "parts", *more, f"train.shard={shard}")
            with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
                if groups[size].rank() == signalled:
                    patch.setattr(policy_trainer, "minibatches", terminated)
                run_training(settings, ranks=ranks_of(groups[size]), auto=True)
    if 1 in groups:
        return digest(run_training(settings_of(folder / "parts", *more), ranks=ranks_of(groups[1]), auto=True))
    return {}


def terminated(*args: Any) -> Any:
    """`minibatches`, in a process that gets SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    return minibatches(*args)


def faulty(groups: dict[int, ProcessGroup], folder: Path) -> str:
    """The error of a run on two ranks, of which the second one scores one ulp too high."""
    if 2 not in groups:
        return ""

    def score(*args: Any, **kwargs: Any) -> Any:
        found = batch.score(*args, **kwargs)
        return found._replace(logp=found.logp * (1 + 2**-22))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(MismatchError) as raised:
        if groups[2].rank() == 1:
            patch.setattr(policy_trainer, "score", score)
        run_training(settings_of(folder / "faulty", *QUIET), ranks=ranks_of(groups[2]))
    return str(raised.value)


def work(groups: dict[int, ProcessGroup], folder: Path) -> dict[str, Any]:
    return {
        "runs": everything(groups, folder),
        "resumed": resumed(groups, folder),
        "faulty": faulty(groups, folder),
    }


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(partial(work, folder=folder), folder)


@pytest.fixture
def found(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    return everyone[0]


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind != "grpo one leaf"])
def test_any_number_of_ranks(found: dict[str, Any], kind: str) -> None:
    one, two, four = (found["runs"][kind][size] for size in "124")
    if kind == "grpo minibatches":  # the means over micro-batches in the metrics depend on their borders
        assert len({one.pop("metrics"), two.pop("metrics"), four.pop("metrics")}) > 1
    assert one == two == four


@pytest.mark.parametrize("kind", ("grpo", "sft"))
def test_what_is_sharded_changes_no_bit(found: dict[str, Any], kind: str) -> None:
    for shard in ("gradients", "weights"):
        assert found["runs"][f"{kind} {shard}"]["1"] == found["runs"][kind]["1"]


def test_leaves_decide_the_bits(found: dict[str, Any], tmp_path: Path) -> None:
    plain = digest(run_training(settings_of(tmp_path, *QUIET, "train.leaves=1")))
    assert found["runs"]["grpo one leaf"]["1"] == plain  # within a process group nothing changes
    dealt = digest(run_training(settings_of(tmp_path / "dealt", *QUIET)))
    assert dealt["weights"] != plain["weights"] and len(dealt) == 4


def test_resumed_on_other_numbers_of_ranks(found: dict[str, Any]) -> None:
    assert found["resumed"] == found["runs"]["grpo"]["1"]


def test_a_fault_of_one_rank_stops_all_and_names_it(everyone: list[dict[str, Any]]) -> None:
    messages = {found["faulty"] for found in everyone[:2]}
    assert len(messages) == 1 and "first: rank 1, completion 4, " in messages.pop()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train.leaves=1 cannot be shared by 2 ranks; set train.leaves to a multiple"):
        run_training(settings_of(tmp_path), ranks=Ranks(size=2))
    with pytest.raises(InputError, match=r"train\.leaves"):
        settings_of(tmp_path, "train.leaves=3")
    with pytest.raises(InputError, match=r"train\.shard=weights belongs to updates with leaves; set train\.leaves=8"):
        settings_of(tmp_path, "train.shard=weights")


def test_leaves_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("grpo").train.leaves == 1
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert resolve("grpo").train.leaves == 8
    assert resolve("grpo", overrides=["train.leaves=2"]).train.leaves == 2
