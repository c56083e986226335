"""The losses of `method=NAME` against TRL's own code: loss and gradient of `GRPOTrainer` and `RLOOTrainer`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer as TRLGRPO
from trl.trainer.rloo_trainer import RLOOTrainer as TRLRLOO

from rlkernel.training.batch import Trajectory
from rlkernel.training.config import Settings, clip_range, resolve
from rlkernel.training.grpo import GRPOTrainer
from rlkernel.training.media import Prompt
from rlkernel.training.policy_metrics import GradedCompletion
from rlkernel.training.policy_trainer import PolicyTrainer, _normalizer
from rlkernel.training.rollout import Completion

LENGTHS = (7, 3, 12, 1, 5, 9)
LONGEST = 16  # rollout.max_tokens


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-torch.randn(n, generator=generator).abs() for n in LENGTHS]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def settings_of(method: str) -> Settings:
    return resolve("grpo", overrides=[f"method={method}", f"rollout.max_tokens={LONGEST}", "rollout.group_size=3"])


def ours(settings: Settings, logp: list[Tensor], old: list[Tensor], ref: list[Tensor], advantages: Tensor) -> Any:
    """(loss, gradient by token) of the trainer's loss on the completions as one minibatch."""
    graded = [
        GradedCompletion(
            Completion(Prompt({}, [0]), Trajectory([0], [0] * len(o), o), "", [], False), True, a[None], ref_logp=r
        )
        for o, r, a in zip(old, ref, advantages, strict=True)
    ]
    leaf = torch.cat(logp).requires_grad_()
    packed = SimpleNamespace(cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int())
    stub: Any = SimpleNamespace(settings=settings, device="cpu")
    result: Any = SimpleNamespace(logp=leaf, entropy=torch.zeros_like(leaf))
    loss, _ = PolicyTrainer._loss(stub, graded, packed, result, _normalizer(settings, graded))  # type: ignore[arg-type]
    loss.backward()
    return loss.detach(), leaf.grad


def theirs(trainer: Any, settings: Settings, logp: list[Tensor], old: list[Tensor], **inputs: Tensor) -> Any:
    """(loss, gradient by token) of TRL's `_compute_loss` on the padded completions."""
    leaf, mask = padded(logp).requires_grad_(), padded([torch.ones(n) for n in LENGTHS])
    low, high = clip_range(settings.loss.clip_low), clip_range(settings.loss.clip_high)
    cispo = settings.loss.type == "cispo"
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if settings.loss.type == "gspo" else "token",
        beta=settings.loss.kl_coef,
        loss_type="grpo" if settings.loss.type == "gspo" else settings.loss.type,
        epsilon_low=low,
        epsilon_high=1 + high if cispo else high,  # TRL's bound of cispo is the weight itself
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **k: x),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    given = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
    loss = trainer._compute_loss(stub, None, {**given, **inputs})
    loss.backward()
    return loss.detach(), torch.cat([row[:n] for row, n in zip(leaf.grad, LENGTHS, strict=True)])


@pytest.mark.parametrize("method", ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"))
def test_the_losses_are_trls(method: str) -> None:
    settings = settings_of(method)
    logp, ref, noise = draw(0), draw(1), draw(2)
    spread = 3e-3 if method == "gspo" else 1.0  # ratios within, below and above the clip range
    old = [x + spread * (n + 0.8) for x, n in zip(logp, noise, strict=True)]
    advantages = torch.tensor([1.2, -0.4, 0.3, -2.0, 0.9, -0.7])
    mine = ours(settings, logp, old, ref, advantages)
    inputs = {"advantages": advantages, "old_per_token_logps": padded(old), "ref_per_token_logps": padded(ref)}
    trl = theirs(TRLGRPO, settings, logp, old, **inputs, num_items_in_batch=torch.tensor(float(sum(LENGTHS))))
    for own, other, what in zip(mine, trl, ("loss", "gradient"), strict=True):
        assert torch.allclose(own, other, rtol=2e-5, atol=1e-7), f"{what} of {method}: {own} and {other}"
    assert mine[1].abs().max() > 0
    if method != "cispo":
        assert (mine[1] == 0).any() or settings.loss.kl_coef, "some tokens are clipped"


def test_rloo_is_trls_on_fresh_samples() -> None:
    """TRL clips the ratio of a completion, the paper has none; at a ratio of 1 both have the same gradient."""
    settings = settings_of("rloo")
    logp, ref = draw(0), draw(1)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.2, 0.9, 0.4])
    kl = torch.stack([(x - r).double().sum() for x, r in zip(logp, ref, strict=True)])
    shaped = (rewards - settings.kl.coef * kl).view(2, 3)
    advantages = (shaped - (shaped.sum(1, keepdim=True) - shaped) / 2).flatten().float()
    graded = [
        GradedCompletion(
            Completion(Prompt({}, [0]), Trajectory([0], [0] * len(x), x), "", [], False),
            True,
            torch.zeros(1),
            ref_logp=r,
        )
        for x, r in zip(logp, ref, strict=True)
    ]
    stub: Any = SimpleNamespace(settings=settings, kl=SimpleNamespace(coef=settings.kl.coef))
    found = torch.cat(GRPOTrainer.advantages(stub, graded, rewards.tolist()))
    assert torch.allclose(found, advantages, rtol=1e-5, atol=1e-6)
    _, gradient = ours(settings, logp, logp, ref, found)
    old = torch.stack([x.sum() for x in logp])
    _, trl = theirs(TRLRLOO, settings, logp, logp, advantages=advantages, old_logps=old)
    assert torch.allclose(gradient, trl, rtol=1e-5, atol=1e-7) and gradient.abs().max() > 0
