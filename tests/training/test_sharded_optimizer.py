"""Gradients of layers that share memory: their size, and what a leaf may not do."""

from __future__ import annotations

import pytest
import torch
from training.tiny import TINY

from rlkernel.models import Decoder
from rlkernel.models.config import from_hf
from rlkernel.parallel.ranks import Ranks
from rlkernel.training.batch import Trajectory, pack_trajectories, score
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.sharded_optimizer import ShardedOptimizer, make_optimizer

CONFIG = {"model_type": "qwen3", "vocab_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
          "hidden_act": "silu", **TINY, "num_hidden_layers": 4}  # fmt: skip


def model() -> Decoder:
    return Decoder.from_config(from_hf(CONFIG, "tiny"), std=0.3)


def backward(policy: Decoder) -> None:
    packed = pack_trajectories([Trajectory([1, 2], [3, 4, 5])], "cpu")
    (-score(policy, packed).logp).sum().backward()


def test_layers_share_the_memory_of_their_gradients() -> None:
    sizes = []
    for shard in ("states", "gradients"):
        policy = model()
        optimizer = make_optimizer(policy, OptimizerSettings(), 1, Ranks(leaves=2), shard)  # type: ignore[arg-type]
        assert isinstance(optimizer, ShardedOptimizer)
        storages = {p.main_grad.untyped_storage().data_ptr(): p.main_grad.untyped_storage().nbytes()
                    for p in policy.parameters()}  # fmt: skip
        sizes.append(sum(storages.values()))
        weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
        for _ in range(2):
            backward(policy)
            optimizer.end_leaf()
        assert optimizer.step().grad_norm > 0
        assert any(not torch.equal(p, weights[name]) for name, p in policy.named_parameters())
    layer, rest = 8, 2  # matrices and norms, of one segment of 16384 elements each
    assert sizes == [4 * 16384 * (4 * layer + rest), 4 * 16384 * (layer + rest)]


def test_a_leaf_is_one_backward() -> None:
    policy = model()
    optimizer = make_optimizer(policy, OptimizerSettings(), 1, Ranks(leaves=2), "gradients")
    backward(policy)
    with pytest.raises(RuntimeError, match=r"a leaf is one backward, and a second one has begun"):
        backward(policy)
    with pytest.raises(RuntimeError, match=r"raise train\.leaves, set train\.gradient_checkpointing=true"):
        optimizer.discard_leaf()
    optimizer.close()
    backward(policy)  # without hooks


def test_weights_of_layers_are_freed_and_gathered() -> None:
    policy = model()
    optimizer = make_optimizer(policy, OptimizerSettings(), 1, Ranks(leaves=2), "weights")
    layers = [p for name, p in policy.named_parameters() if name.startswith("layers.")]
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with optimizer.whole_weights():
        assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert {p.untyped_storage().nbytes() for p in layers} == {0}
    backward(policy)
    assert {p.untyped_storage().nbytes() for p in layers} == {0}
    tensors = optimizer.model_tensors()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    optimizer.close()
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
