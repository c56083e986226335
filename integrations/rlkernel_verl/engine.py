"""verl's FSDP2 engine on rlkernel's ops: forward, log-probabilities, gradients, norm and AdamW.

verl's own methods build the model, shard it, run the loss and keep checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

import rlkernel_transformers
from rlkernel.optim import AdamW
from rlkernel.parallel.fsdp2 import set_tree_reduction
from rlkernel.parallel.norm import grad_norm
from rlkernel_transformers.masters import main_grads
from rlkernel_transformers.packing import IGNORED
from rlkernel_verl import checks
from rlkernel_verl.certificate import Certificate
from rlkernel_verl.leaves import Leaves, deal
from rlkernel_verl.weights import SyncedWeights


class ExactUpdate(FSDPEngineWithLMHead):
    """The part that actor and critic share: checks, leaves, norm and optimizer."""

    def __new__(cls, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> Any:
        """verl's own engine if the model's configuration does not have the flag."""
        if getattr(model_config, "use_rl_kernel_backend", False):
            found = list(checks.of_engine(engine_config))
            checks.report_inexact(model_config.rl_kernel_strict, found)
            if not found:
                return super().__new__(cls)
        return cls.stock()(model_config, engine_config, *args, **kwargs)

    @classmethod
    def stock(cls) -> type:
        """verl's own class."""
        return FSDPEngineWithLMHead

    findings = staticmethod(checks.of_policy)  # settings of the model that cannot be exact

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        self.strict = model_config.rl_kernel_strict
        checks.report_inexact(self.strict, list(self.findings(model_config)))
        # The forwards are replaced after loading, so that the attention kernels that it names need not be installed.
        model_config.hf_config._attn_implementation = "sdpa"
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.leaves = Leaves(
            model_config.rl_kernel_leaves, dist.get_world_size(), self.get_data_parallel_rank(), self.device_mesh
        )

    def _build_fsdp_module(self, module: Any) -> Any:
        module = super()._build_fsdp_module(module)
        self._rounds = 0
        return module

    def _build_optimizer(self, module: Any) -> Any:
        config = self.optimizer_config
        refused = "; ".join(f"{setting}: {reason}" for setting, reason in checks.of_optimizer(config))
        if refused:  # strict or not, because the update reads rlkernel's AdamW
            raise checks.ExactnessLostError(f"use_rl_kernel_backend: {refused}")
        others = config.override_optimizer_config or {}
        return AdamW(
            [p for p in module.parameters() if p.requires_grad],
            lr=config.lr,
            betas=tuple(config.betas),
            eps=others.get("eps", 1e-8),
            weight_decay=config.weight_decay,
        )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """As verl's; an update's gradients are those of leaves, which its samples are dealt to by their contents."""
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only=True)
        batches = deal(data, self.leaves, self.get_data_parallel_group())
        if self._rounds != len(batches):
            set_tree_reduction(self.module, rounds=len(batches))
            self._rounds = len(batches)
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        outputs = []
        for batch in batches:
            tu.assign_non_tensor(
                batch, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size(), sp_size=1
            )
            loss, output = self.forward_step(batch, loss_function=loss_function, forward_only=False)
            # verl's losses count W-fold, for an average over ranks. W is a power of two, so no bit changes.
            (loss / self.get_data_parallel_size()).backward()
            output.pop("model_output")
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=None, data=data)

    def optimizer_step(self) -> float:
        """Clips by the contract's gradient norm, the same on any number of ranks, and updates."""
        grads = self.optimizer.gradients()
        found = grad_norm(grads, self.optimizer_config.clip_grad)
        if torch.isfinite(found.norm):
            self.optimizer.step(scale=found.scale.to(grads[0].device))
        else:
            print(f"WARN: grad_norm is not finite: {found.norm}")
            self.optimizer.zero_grad()
        return float(found.norm)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        micro_batch = micro_batch.to(get_device_id())
        found = self.outputs(micro_batch)
        offsets = micro_batch["input_ids"].offsets()
        model_output = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in found.items()}
        if loss_function is None:
            assert forward_only, "forward_only must be True when loss_function is None"
            loss, metrics = torch.tensor(1.0, device=get_device_id()), {}
        else:
            loss, metrics = loss_function(
                model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        output = {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        return loss, output

    def outputs(self, micro_batch: TensorDict) -> dict[str, Tensor]:  # each [T]
        """What the model computes for each token of a micro-batch."""
        raise NotImplementedError


class ExactEngine(ExactUpdate):
    """The engine of the actor and of the reference policy."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.certificate = Certificate(self.strict)
        self._adapter_disabled = False
        tokenizer = self.model_config.tokenizer
        # vLLM under verl never samples ids above the tokenizer's, so they have no probability in the trainer either.
        size = self.model_config.hf_config.vocab_size
        self.vocabulary = size if tokenizer is None else min(size, len(tokenizer))

    def _build_module(self) -> Any:
        return self._apply(super()._build_module())

    def _build_lora_module(self, module: Any) -> Any:
        return self._apply(super()._build_lora_module(module), adapters="merged")

    def _apply(self, module: Any, **options: Any) -> Any:
        return rlkernel_transformers.apply(
            module,
            join_weights=False,  # FSDP2 shards each weight
            tp_leaves=self.model_config.rl_kernel_tp_leaves,
            attention_variant=self.model_config.rl_kernel_attention,
            **options,
        )

    def _build_fsdp_module(self, module: Any) -> Any:
        module = super()._build_fsdp_module(module)
        if not self.engine_config.forward_only:
            main_grads(module)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """As `ExactUpdate`'s; compares sampled tokens as long as the weights are those that the rollout has."""
        out = super().forward_backward_batch(data, loss_function, forward_only)
        if forward_only and not self._adapter_disabled and not self.engine_config.forward_only:
            self.certificate.add(data, out["model_output"]["log_probs"])
            self.certificate.close(self.get_data_parallel_group())
        elif not forward_only:
            out["metrics"] |= self.certificate.close(self.get_data_parallel_group())
        return out

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only:
            self.certificate.add(micro_batch, output["model_output"]["log_probs"])
        return loss, output

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        self.certificate.synced = None
        return norm

    def outputs(self, micro_batch: TensorDict) -> dict[str, Tensor]:
        _refuse(micro_batch)
        ids, positions = micro_batch["input_ids"], micro_batch["position_ids"]
        found = rlkernel_transformers.token_logprobs(
            self.module,
            ids.values()[None],
            position_ids=positions.values()[None],
            targets=_targets(micro_batch)[None],
            temperature=_temperature(micro_batch),
            vocabulary=self.vocabulary,
        )
        assert found.logp is not None and found.entropy is not None
        out = {"log_probs": found.logp[0]}
        if tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False):
            out["entropy"] = found.entropy[0]
        return out

    @contextlib.contextmanager
    def _without_adapter(self) -> Iterator[None]:
        with self.module.disable_adapter():
            self._adapter_disabled = True
            try:
                yield
            finally:
                self._adapter_disabled = False

    def disable_adapter(self) -> Any:
        """A block in which the model is the reference policy, without its adapter."""
        return self._without_adapter()

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Any, None]:
        """The weights that the forward computes with, in its dtype, with LoRA merged: what the rollout has to load."""
        if self.is_param_offload_enabled:
            load_fsdp_model_to_gpu(self.module)  # verl's worker offloads it again after the delivery
        weights = SyncedWeights(self.module)
        self.certificate.synced = weights
        return weights, None


def _targets(batch: TensorDict) -> Tensor:  # [T] int64
    """The next token of each; IGNORED at the last token of a sequence, and before a response's if there are prompts."""
    ids = batch["input_ids"]
    ends = ids.offsets()[1:]
    targets = torch.roll(ids.values(), -1).long()
    targets[ends - 1] = IGNORED
    prompts = batch.get("prompts", None)
    if prompts is not None and prompts.is_nested:
        place = torch.arange(len(targets), device=targets.device)
        first = torch.repeat_interleave(ids.offsets()[:-1] + prompts.offsets().diff() - 1, ids.offsets().diff())
        targets[place < first] = IGNORED
    return targets


def _temperature(batch: TensorDict) -> float:
    temperature = batch["temperature"]
    if not isinstance(temperature, Tensor):
        return float(temperature)
    values = temperature.unique()
    if len(values) > 1:
        raise ValueError(f"temperature differs between samples of a batch: {values.tolist()}; expected one value")
    return float(values)


def _refuse(batch: TensorDict) -> None:
    """Raises ExactnessLostError for outputs that verl asks for and rlkernel does not compute."""
    asked = [
        name
        for name in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
        if tu.get_non_tensor_data(batch, key=name, default=False)
    ]
    if asked:
        raise checks.ExactnessLostError(f"use_rl_kernel_backend: {', '.join(asked)} is not computed; switch it off")
