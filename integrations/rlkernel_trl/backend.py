"""What one trainer holds under the flag: its settings checked, its models prepared, its comparisons and certificate.

The trainer classes only tell it when things happen; everything that is not TRL's own is here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import TrainerCallback

from rlkernel_trl.config import weight_dtype
from rlkernel_trl.errors import ExactnessLostError
from rlkernel_trl.exactness import Certificate, Comparison, Verdict
from rlkernel_trl.forward import Call, Filters, Ragged, install
from rlkernel_trl.optimizer import STANDARD, MasterAdamW, round_weights

logger = logging.getLogger("rlkernel_trl")

# Sampling parameters that leave the distribution of a token as it is.
_HARMLESS = {
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
}

_COLDEST = 0.01  # vLLM raises lower temperatures to it


@dataclass
class Round:
    """One generation, from its prompts to the last update that uses it.

    Attributes:
        step: updates made when it was sampled.
        captured: its log-probabilities, a list a completion; tools: masks of tokens that tools wrote.
        sampled: [B, C] fp32, the same as a tensor; tool_mask: [B, C] or None.
        kept: sets of tokens that it was sampled from, a completion each; None: not known, or no filters.
        expects_old: TRL's next forward is that for old log-probabilities.
        may_skip: that forward may be left out; skipped: it was; None: TRL computes none.
        open: its completions are still being generated or scored.
        turns: how often rlkernel's engine has sampled for it; more than once where tools answered.
    """

    step: int = -1
    captured: list[Any] | None = None
    tools: list[Any] | None = None
    sampled: Tensor | None = None
    tool_mask: Tensor | None = None
    kept: list[Ragged] | None = None
    expects_old: bool = False
    may_skip: bool = False
    skipped: bool | None = None
    open: bool = False
    turns: int = 0

    def keep(self, kept: list[Ragged] | None) -> None:
        """Takes the sets of a turn; those of several turns are rebuilt, with what tools wrote in between."""
        self.kept = None if self.turns else kept
        self.turns += 1

    def take(self, width: int, device: torch.device) -> None:
        """Turns what was captured into tensors, padded to `width`."""
        if self.captured is None or self.sampled is not None:
            return
        if self.kept is not None and [len(row) for row in self.captured] != [ends.numel() - 1 for _, ends in self.kept]:
            self.kept = None  # a caller of ours added tokens of an environment: the sets are rebuilt for all
        rows = _padded(self.captured, width, 0.0)
        self.sampled = rows.to(device)
        self.tool_mask = None if self.tools is None else _padded(self.tools, width, 1.0).to(device).int()
        if bool(rows.isnan().any()):
            self.may_skip = False  # vLLM could not score a token


class Backend:
    """State of one trainer.

    Args:
        settings: its configuration, with `use_rl_kernel_backend`.
        arguments: what its constructor was given, by name.

    Attributes:
        calls: one a model that scores, the policy's first.
        comparison, certificate: see `exactness`.
        filters: of sampling.
        engine: rlkernel's, which samples without vLLM; None: vLLM does, or, not exactly, transformers' generate.
        inputs: the micro-batch whose loss is being computed, or None.
        adapter: name of the policy's adapter, under PEFT.
    """

    def __init__(self, settings: Any, arguments: dict[str, Any]):
        self.settings, self.strict = settings, settings.rl_kernel_strict
        self.model_given = arguments.get("model")
        self.rollout_func: Any = arguments.get("rollout_func")
        self.engine: Any = None
        self.samples = hasattr(settings, "num_generations")
        correction = getattr(settings, "vllm_importance_sampling_correction", False)
        self.logged_by_trl = self.samples and settings.use_vllm and correction
        self.calls: list[Call] = []
        self.masters: dict[Tensor, Tensor] = {}
        self.comparison = Comparison()
        self.certificate = Certificate(settings.rl_kernel_check_steps, settings.rl_kernel_recheck_every, self.strict)
        self.filters = Filters(1.0)
        self._rounds = {"train": Round(), "eval": Round()}  # an evaluation may come between the updates of a generation
        self._prepared: list[tuple[Any, Any]] = []  # models, and the forward that each had of its own, or None
        self._told: set[str] = set()
        self.own_optimizer = True
        self.inputs: dict[str, Any] | None = None
        self.adapter: Any = None
        self._check(arguments)

    # Settings

    def lose(self, why: str) -> None:
        """Exactness is lost: raises in strict mode, else logs, once for each reason.

        Raises:
            ExactnessLostError: in strict mode.
        """
        if self.strict:
            raise ExactnessLostError(f"use_rl_kernel_backend: {why} (rl_kernel_strict=False logs this and goes on)")
        if why not in self._told:
            logger.warning("rlkernel: not exact: %s", why)
        self._told.add(why)

    def _check(self, arguments: dict[str, Any]) -> None:
        s = self.settings
        kwargs = s.model_init_kwargs or {}
        if s.use_liger_kernel or kwargs.get("use_kernels"):
            raise ExactnessLostError(
                "use_rl_kernel_backend: use_liger_kernel and use_kernels replace the layers that rlkernel replaces; "
                "switch them off"
            )
        if s.torch_compile:
            raise ExactnessLostError("use_rl_kernel_backend: torch_compile is not supported; leave it out")
        if s.fp16_full_eval or s.bf16_full_eval:
            raise ExactnessLostError(
                "use_rl_kernel_backend: fp16_full_eval and bf16_full_eval cast the model when it is evaluated, and it "
                "stays so; leave them out: it is evaluated in the dtype that it is trained in"
            )
        if s.neftune_noise_alpha is not None and self.samples:
            raise ExactnessLostError(
                "use_rl_kernel_backend: neftune_noise_alpha adds noise to the embeddings in training, which the "
                "rollout does not have; leave it out"
            )
        self._check_adapters(arguments)
        if arguments.get("quantization_config") is not None or "quantization_config" in kwargs:
            self.lose("a quantized model has other weights in training than in vLLM")
        if s.optim not in STANDARD:
            self.own_optimizer = False
            self.lose(f"optim={s.optim!s} steps the weights without fp32 masters; use one of {', '.join(STANDARD)}")
        given = (arguments.get("optimizers") or (None, None))[0] or arguments.get("optimizer_cls_and_kwargs")
        if given is not None:
            self.own_optimizer = False
            kind = given[0] if isinstance(given, tuple) else type(given)
            self.lose(
                f"the optimizer {kind.__name__} that the trainer was given steps the weights without fp32 masters; "
                f"leave it out and set optim to one of {', '.join(STANDARD)}"
            )
        self._check_precision(os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")  # what a launcher asks for
        if self.samples:
            self._check_sampling(arguments)
        self.dtype = weight_dtype(s)
        if s.rl_kernel_dtype == "float32" and isinstance(self.model_given, torch.nn.Module):
            self.dtype = next(self.model_given.parameters()).dtype

    def _check_adapters(self, arguments: dict[str, Any]) -> None:
        found = [arguments.get("peft_config"), *getattr(self.model_given, "peft_config", {}).values()]
        for config in found:
            if config is not None and str(getattr(config, "peft_type", "")).rpartition(".")[2] != "LORA":
                raise ExactnessLostError(
                    f"use_rl_kernel_backend: adapters of {type(config).__name__} are not supported; rlkernel computes "
                    "plain LoRA, which can be merged into the weights that an engine holds: use peft.LoraConfig"
                )

    def _check_precision(self, mixed: str) -> None:
        if mixed != "no":
            self.lose(
                f"accelerate runs mixed_precision={mixed!r} autocast; launch with mixed_precision=no: the weights are "
                "bf16 already"
            )

    def _check_sampling(self, arguments: dict[str, Any]) -> None:
        s = self.settings
        if s.temperature <= 0:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: temperature={s.temperature}: logits are divided by it, in sampling and in "
                "training; set a positive value"
            )
        self.filters = Filters(s.temperature, max(s.top_k or 0, 0), 1.0 if s.top_p is None else s.top_p, s.min_p or 0.0)
        ours = not s.use_vllm and self._engine_samples()
        self.certificate.rebuilds = self.filters.active and not ours
        if ours:
            return
        if s.repetition_penalty != 1.0:
            self.lose("repetition_penalty changes the sampled distribution, and the trainer scores without it")
        if getattr(s, "vllm_structured_outputs_regex", None):
            self.lose("vllm_structured_outputs_regex masks tokens that the trainer's log-probabilities count")
        if s.use_vllm and 0 < s.temperature < _COLDEST:
            self.lose(f"temperature={s.temperature}: vLLM samples at {_COLDEST}, the lowest that it takes; set that")
        taken = _HARMLESS if s.use_vllm else {*_HARMLESS, "logprobs"}
        changed = sorted(set(s.generation_kwargs or {}) - taken)
        if changed:
            self.lose(f"generation_kwargs {', '.join(changed)}: the trainer's log-probabilities do not know them")
        if s.use_vllm and s.vllm_model_impl == "transformers":
            self.lose("vllm_model_impl='transformers' builds layers that rlkernel_vllm does not replace")

    def _engine_samples(self) -> bool:
        """Without vLLM: whether rlkernel's engine samples every turn, as it does by default.

        Under a `rollout_func` of the user's it samples the turns after a tool's answer, for which TRL asks the trainer.

        Raises:
            ExactnessLostError: it lacks what the configuration asks for; as the default, in strict mode only.
        """
        from rlkernel_trl.rollout import Rollout

        s, given = self.settings, self.rollout_func
        self.engine = given if isinstance(given, Rollout) else Rollout()
        if given is not None and given is not self.engine:
            return False
        refused = self.engine.refuses(s)
        if refused and given is not None:
            raise ExactnessLostError(f"use_rl_kernel_backend: {refused}")
        if refused:
            self.engine = None
            self.lose(f"{refused}, or sample inexactly with transformers' generate")
        elsewhere = [n for n in ("use_transformers_continuous_batching", "cache_implementation") if getattr(s, n, None)]
        if elsewhere and not refused:
            logger.warning("rlkernel: %s left out: rlkernel's engine samples, not generate", ", ".join(elsewhere))
        return not refused

    # Construction

    @contextlib.contextmanager
    def construction(self, trainer_class: type) -> Iterator[None]:
        """While TRL's constructor runs: every model that it gives a fused head is prepared, vLLM gets the plugin."""
        from rlkernel_trl import vllm

        module = sys.modules[trainer_class.__module__]
        original = getattr(module, "add_fused_lm_head", None)
        if original is None:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: TRL {trl.__version__} computes log-probabilities in another way than TRL "
                "1.16, which rlkernel_trl takes: pip install 'trl>=1.16,<1.17'"
            )

        def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
            self._prepared.append((model, model.__dict__.get("forward")))
            self.prepare(model)
            original(model, *args, **kwargs)
            temperature = args[0] if args else kwargs.get("temperature", 1.0)
            call = Call(strict=self.strict)
            install(model, call, temperature=temperature, outputs=kwargs.get("outputs", ("log_probs",)))
            self.calls.append(call)

        cast = getattr(self.settings, "cast_lm_head_to_fp32", False)
        if cast:
            self.settings.cast_lm_head_to_fp32 = False
            logger.warning(
                "rlkernel: cast_lm_head_to_fp32 is left out: logits are fp32 sums already, and the head's weight stays "
                "%s, as it is in the rollout",
                str(self.dtype).removeprefix("torch."),
            )
        module.add_fused_lm_head = add_fused_lm_head  # type: ignore[attr-defined]
        try:
            with vllm.engine_arguments(self):
                yield
        finally:
            module.add_fused_lm_head = original  # type: ignore[attr-defined]
            if cast:
                self.settings.cast_lm_head_to_fp32 = True

    def prepare(self, model: Any) -> None:
        """Rounds a model's weights and puts rlkernel's ops under it.

        Raises:
            UnsupportedModelError: rlkernel has no forward for it, strict or not.
            ExactnessLostError: its weights are neither fp32 nor bf16, strict or not.
        """
        from rlkernel_transformers import apply

        for name, p in model.named_parameters():
            other = p.is_floating_point() and p.dtype not in (torch.float32, self.dtype)
            if (other and ".lora_" not in name) or p.dtype == torch.float16:
                raise ExactnessLostError(
                    f"use_rl_kernel_backend: {name} is {p.dtype}; expected {self.dtype}, or float32, which is rounded "
                    "to it: load the model in one of these (model_init_kwargs={'dtype': 'bfloat16'})"
                )
        # LoRA as vLLM gets it; its dropout only where no rollout has to be equalled.
        apply(model, adapters="merged", lora_dropout=not self.samples)
        rounded = round_weights(model, self.dtype)
        if rounded:
            self.masters.update(rounded)
            apply(model, adapters="merged", lora_dropout=not self.samples)  # the rounded weights lie elsewhere

    def undo(self) -> None:
        """A constructor that failed leaves no trace on models that it was given: forwards and weights are as before.

        Weights that are not trained (the base of an adapter) stay rounded: their fp32 values are not kept.
        """
        from rlkernel_transformers import UnsupportedModelError, remove

        for model, forward in reversed(self._prepared):
            model.__dict__.pop("forward", None)
            with contextlib.suppress(UnsupportedModelError):  # what was refused has nothing to remove
                remove(model)
            if forward is not None:
                model.forward = forward
        for parameter, master in self.masters.items():
            parameter.data = master
        self._prepared.clear()
        self.masters.clear()

    def attach(self, trainer: Any) -> None:
        """After TRL's constructor: what needs the finished trainer."""
        from rlkernel_trl import vllm

        self._check_precision(trainer.accelerator.mixed_precision)
        trainer.add_callback(_BeforeUpdate(self, trainer))
        if self.samples and self.settings.use_vllm:
            vllm.attach(self, trainer)
        self._prepared.clear()

    def optimizer(self, trainer: Any, model: Any) -> torch.optim.Optimizer:
        """AdamW on fp32 masters with the Trainer's own settings and groups."""
        s = self.settings
        decay = set(trainer.get_decay_parameter_names(model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return MasterAdamW(
            [
                {"params": [p for name, p in named if name in decay], "weight_decay": s.weight_decay},
                {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
            ],
            model=model,
            masters=self.masters,
            processes=trainer.accelerator.num_processes,
            lr=s.learning_rate,
            betas=(s.adam_beta1, s.adam_beta2),
            eps=s.adam_epsilon,
        )

    # One generation

    def begin(self, trainer: Any, computes_old: bool) -> Round:
        """A generation starts; `computes_old`: TRL's first forward in it is for old log-probabilities."""
        self.certificate.skips = computes_old
        found = Round(
            step=trainer.state.global_step,
            expects_old=computes_old,
            may_skip=computes_old and self.certificate.may_skip(),
            skipped=False if computes_old else None,
            open=True,
        )
        self._rounds[_mode(trainer)] = found
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.adapter = model.active_adapter if is_peft_model(model) else None
        return found

    @contextlib.contextmanager
    def policy(self, trainer: Any) -> Iterator[None]:
        """The policy's adapters, where TRL has switched them off, or to those of the reference, for a forward."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not is_peft_model(model):
            yield
            return
        off = any(getattr(module, "disable_adapters", None) is True for module in model.modules())
        asked = model.active_adapter
        model.base_model.enable_adapter_layers()
        model.set_adapter(self.adapter)
        try:
            yield
        finally:
            model.set_adapter(asked)
            if off:
                model.base_model.disable_adapter_layers()

    def round(self, trainer: Any) -> Round:
        """The last generation, of training or of evaluation."""
        return self._rounds[_mode(trainer)]

    def close(self, trainer: Any) -> Verdict:
        """Judges what was compared since the last call and logs it; before the optimizer's step.

        Raises:
            MismatchError: a token differs, in strict mode.
            ExactnessLostError: nothing of a new generation was compared, in strict mode.
        """
        metrics, at = trainer._metrics[_mode(trainer)], self.round(trainer)
        skipped = at.skipped
        if self.samples and self.comparison.empty and at.step == trainer.state.global_step:
            self.lose(
                "no sampled token was compared with the training forward: "
                + (
                    "the rollout returned no log-probabilities"
                    if at.sampled is None
                    else f"{type(trainer).__name__} does not score the batch with the trainer's "
                    "_get_per_token_logps_and_entropies; call it, or super()'s method, where yours overrides it"
                )
            )
        verdict = self.comparison.close(trainer.accelerator)
        if verdict.tokens:
            metrics["rlkernel/exact_frac"].append(verdict.exact_frac)
            metrics["rlkernel/mismatch_tokens"].append(verdict.mismatch_tokens)
            metrics["rlkernel/drift_max"].append(verdict.drift_max)
            if skipped is not None:
                metrics["rlkernel/old_logps_skipped"].append(float(skipped))
            if skipped or not self.logged_by_trl:
                metrics["sampling/sampling_logp_difference/mean"].append(verdict.mean)
                metrics["sampling/sampling_logp_difference/max"].append(verdict.drift_max)
        metrics["rlkernel/fallbacks"].append(sum(call.fallbacks for call in self.calls))
        for call in self.calls:
            call.fallbacks = 0
        if self.samples:
            self.certificate.update(verdict, trainer.state.global_step)
        return verdict


def _mode(trainer: Any) -> str:
    return "train" if trainer.model.training else "eval"


def _padded(rows: list[list[float | None]], width: int, value: float) -> Tensor:  # [B, width] fp32
    out = torch.full((len(rows), width), value, dtype=torch.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor([math.nan if x is None else x for x in row], dtype=torch.float32)
    return out


class _BeforeUpdate(TrainerCallback):
    """Judges the comparison between the last backward and the optimizer's step; keeps DDP from reducing gradients."""

    def __init__(self, backend: Backend, trainer: Any):
        self.backend, self.trainer = backend, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.backend.own_optimizer and self.trainer._master_adamw() is None:
            found = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
            self.backend.lose(
                f"the trainer's optimizer is a {type(found).__name__}, set after construction or by an override of "
                "create_optimizer: it steps the weights without fp32 masters; leave it to the trainer"
            )
        optimizer = self.trainer._master_adamw()
        if optimizer is not None:
            optimizer.follow_weights()
        if hasattr(self.trainer.model_wrapped, "require_backward_grad_sync") and optimizer is not None:
            self.trainer.model_wrapped.require_backward_grad_sync = False  # `MasterAdamW` averages them in fp32

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.backend.close(self.trainer)
