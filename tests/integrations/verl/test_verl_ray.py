"""verl's Ray trainer with real vLLM on CPUs, with and without the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl_side import GPUS, make_data, make_model, train

MODEL, ACTOR, CRITIC = "actor_rollout_ref.model", "actor_rollout_ref.actor", "critic"
DIFFERENCE = "training/rollout_probs_diff_max"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ray")
    make_model(made / "model")
    make_data(made)
    return made


def test_grpo_is_exact(folder: Path) -> None:
    """20 steps, every sampled token compared twice: with old log-probabilities, and with the update's forward."""
    steps, text = train(folder, 20, f"+{MODEL}.use_rl_kernel_backend=True")
    assert len(steps) == 20, text[-3000:]
    assert all(step[DIFFERENCE] == 0 for step in steps)
    assert all(step["actor/rlkernel/exact_frac"] == 1 and step["actor/rlkernel/tokens"] > 0 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def test_stock_verl_is_not(folder: Path) -> None:
    steps, text = train(folder, 2)
    assert len(steps) == 2, text[-3000:]
    assert all(step[DIFFERENCE] > 0 for step in steps)


@pytest.mark.skipif(GPUS == 1, reason="needs two GPUs")
def test_ppo_is_exact_on_two_ranks(folder: Path) -> None:
    """Critic, reference policy, entropy, gradient checkpointing, LoRA, mini-batches, two ranks with a server each."""
    steps, text = train(
        folder,
        3,
        f"+{MODEL}.use_rl_kernel_backend=True",
        f"{MODEL}.lora_rank=4",
        f"{MODEL}.lora.merge=True",
        f"{MODEL}.enable_gradient_checkpointing=True",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=128",
        f"{CRITIC}.model.path={folder}/model",
        f"+{CRITIC}.model.use_rl_kernel_backend=True",
        f"{CRITIC}.strategy=fsdp2",
        f"{CRITIC}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=gae",
        ranks=2,
        timeout=900,
    )
    assert len(steps) == 3, text[-3000:]
    assert all(step[DIFFERENCE] == 0 and step["actor/rlkernel/exact_frac"] == 1 for step in steps)
    assert all(step["critic/vf_loss"] > 0 and step["actor/kl_loss"] >= 0 for step in steps)
