"""transformers' `Trainer` with updates in the contract's order: the same weights on 1, 2, 4 or 8 processes.

`ExactUpdates` is also the base of the trainers of rlkernel_trl.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback

from rlkernel.parallel.tree import require_power_of_two
from rlkernel_transformers.gradient_tree import GradientTree
from rlkernel_transformers.masters import main_grads
from rlkernel_transformers.optimizer import STANDARD, MasterAdamW, restore_weights
from rlkernel_transformers.support import UnsupportedModelError, find_model


class ExactUpdates:
    """Optimizer, sum of the gradients and their norm, for a class derived from `transformers.Trainer`.

    With AdamW (`optim="adamw_torch"`), bf16 weights get fp32 masters: under FSDP2 the shards, else in the optimizer.
    """

    gradient_tree: bool = False
    """Sum the gradients of micro-batches in a binary tree on one process too, as several processes always do. The
    default there is one chain over the micro-batches."""

    _tree: GradientTree | None = None

    def updates_exactly(self) -> bool:
        """Whether this class's methods replace the Trainer's."""
        return True

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.updates_exactly():
            trainer: Any = self
            check_plugins(trainer.accelerator, trainer.args.n_gpu)
            trainer.accelerator.backward = functools.partial(self._backward, trainer.accelerator.backward)

    def create_optimizer(self, model: Any = None) -> Any:
        trainer: Any = self
        if not self.updates_exactly() or trainer.optimizer is not None or trainer.args.optim not in STANDARD:
            return super().create_optimizer(model)  # type: ignore[misc]
        model = trainer.model if model is None else model
        rounded = self._rounded_weights()
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = restore_weights(model, rounded)
        else:
            main_grads(model)
        args = trainer.args
        decay = set(trainer.get_decay_parameter_names(model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        trainer.optimizer = MasterAdamW(
            [
                {"params": [p for name, p in named if name in decay], "weight_decay": args.weight_decay},
                {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
            ],
            model=model,
            masters=rounded,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        )
        return trainer.optimizer

    def start_updates(self) -> None:
        """Follows the weights at the start of training, and sums gradients in the tree from here on."""
        trainer: Any = self
        optimizer = self._master_adamw()
        if optimizer is None:
            return
        optimizer.follow_weights()
        self._tree = optimizer.tree = GradientTree(trainer.model_wrapped) if self.sums_in_tree() else None

    def sums_in_tree(self) -> bool:
        """Whether gradients are summed in the tree, not in one chain."""
        trainer: Any = self
        return bool(trainer.accelerator.num_processes > 1 or trainer.is_fsdp_enabled or self.gradient_tree)

    def _rounded_weights(self) -> dict[Tensor, Tensor]:
        """fp32 values of parameters that were rounded before the optimizer was created."""
        return {}

    def _backward(self, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        if self._tree is None:
            backward(loss, **kwargs)
        else:
            self._tree.backward(backward, loss, **kwargs)

    def _master_adamw(self) -> MasterAdamW | None:
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        return inner if isinstance(inner, MasterAdamW) else None

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer = self._master_adamw()
        if optimizer is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return optimizer.clip(self.args.max_grad_norm)  # type: ignore[attr-defined]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        optimizer = self._master_adamw()
        if optimizer is not None and grad_norm is None:
            grad_norm = optimizer.clip(None)
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]


def check_plugins(accelerator: Any, gpus: int = 1) -> None:
    """Refuses what shards a model in a way that no update can follow exactly.

    Args:
        gpus: of this process, which `torch.nn.DataParallel` would use together.

    Raises:
        ValueError: the number of processes is not a power of two.
        UnsupportedModelError: several GPUs in one process, DeepSpeed, Megatron-LM, FSDP1, a parallelism_config, or an
            option of FSDP2.
    """
    state = accelerator.state
    require_power_of_two("rlkernel: the number of processes", accelerator.num_processes)
    remedy = "launch with FSDP2 (fsdp_version: 2) or DDP (accelerate launch --multi_gpu)"
    if gpus > 1:
        raise UnsupportedModelError(
            f"transformers would train with torch.nn.DataParallel, because one process sees {gpus} GPUs; {remedy}, or "
            "set CUDA_VISIBLE_DEVICES to one of them"
        )
    for name, plugin in (
        ("DeepSpeed", getattr(state, "deepspeed_plugin", None)),
        ("Megatron-LM", getattr(state, "megatron_lm_plugin", None)),
        ("parallelism_config", getattr(accelerator, "parallelism_config", None)),
    ):
        if plugin is not None:
            raise UnsupportedModelError(f"{name} sums weight gradients in an order of its own; {remedy}")
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise UnsupportedModelError(f"fsdp_version is {plugin.fsdp_version}, whose parameters are flattened; {remedy}")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UnsupportedModelError("fsdp_offload_params steps the weights on the CPU; set it to false")
    if plugin.cpu_ram_efficient_loading:
        raise UnsupportedModelError(
            "fsdp_cpu_ram_efficient_loading leaves the weights of all processes except the first unset until training "
            "starts; set it to false"
        )


class _Start(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = self.trainer.optimizer
        if self.trainer._master_adamw() is None:
            found = type(getattr(optimizer, "optimizer", optimizer)).__name__
            raise UnsupportedModelError(
                f"rlkernel_transformers.Trainer: the optimizer is a {found}; leave optimizers out and "
                f"set optim to one of {', '.join(STANDARD)}"
            )
        self.trainer.start_updates()


class Trainer(ExactUpdates, transformers.Trainer):
    """`transformers.Trainer` for a model after `apply`: AdamW over fp32 masters, and gradients in the contract's order.

    Args:
        gradient_tree: as the attribute. The other arguments are the Trainer's.

    Raises:
        ValueError, UnsupportedModelError: as `check_plugins`; or `apply` was not called; at the start of training, the
            optimizer is another one.
    """

    def __init__(self, *args: Any, gradient_tree: bool = False, **kwargs: Any):
        self.gradient_tree = gradient_tree
        super().__init__(*args, **kwargs)
        if "_rlkernel" not in find_model(self.model).model.__dict__:
            raise UnsupportedModelError(
                "rlkernel_transformers.Trainer: call rlkernel_transformers.apply(model) before the trainer gets it"
            )
        self.add_callback(_Start(self))
