"""`Backend`, the state of one trainer under the flag: checks settings, prepares models, compares log-probabilities.

The trainer classes only call it; everything that is not TRL's own is here.
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

from rlkernel_transformers.comparison import Comparison, Verdict
from rlkernel_transformers.optimizer import STANDARD, round_weights
from rlkernel_trl.config import weight_dtype
from rlkernel_trl.deal import deal, gather_kept
from rlkernel_trl.errors import ExactnessLostError
from rlkernel_trl.exactness import Certificate
from rlkernel_trl.forward import Filters, ForwardState, Ragged, install
from rlkernel_trl.seeds import GenerationSeeds

logger = logging.getLogger("rlkernel_trl")

# Sampling parameters that do not change a token's distribution.
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

_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to it


@dataclass
class Generation:
    """One generation, from its prompts to the last update that uses it.

    Attributes:
        step: number of updates before it was sampled.
        captured: the rollout's log-probabilities, one list per completion.
        tools: masks of the tokens that the model, not a tool, wrote, one list per completion.
        sampled: [B, C] fp32, `captured` as a tensor. tool_mask: [B, C], `tools` as a tensor, or None.
        kept: kept sets, one entry per completion; None: unknown, or no filters.
        expects_old: whether TRL's next forward computes old log-probabilities.
        may_skip: whether that forward may be skipped.
        skipped: whether it was; None: TRL does not compute old log-probabilities.
        open: whether completions are still being generated or scored.
        turns: how often rlkernel's engine has sampled for it; more than once if tools answered.
        rows: number of completions of each process.
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
    rows: int = 0

    def keep(self, kept: list[Ragged] | None) -> None:
        """Stores the kept sets of a turn; after several turns they are recomputed, because tools wrote tokens too."""
        self.kept = None if self.turns else kept
        self.turns += 1

    def take(self, width: int, device: torch.device) -> None:
        """Converts the captured lists to tensors, padded to `width`."""
        if self.captured is None or self.sampled is not None:
            return
        if self.kept is not None and [len(row) for row in self.captured] != [ends.numel() - 1 for _, ends in self.kept]:
            self.kept = None  # a rollout_func added an environment's tokens, so all sets are recomputed
        rows = _padded(self.captured, width, 0.0)
        self.sampled = rows.to(device)
        self.tool_mask = None if self.tools is None else _padded(self.tools, width, 1.0).to(device).int()
        if bool(rows.isnan().any()):
            self.may_skip = False  # vLLM could not score a token


class Backend:
    """State of one trainer.

    Args:
        settings: the trainer's configuration, with `use_rl_kernel_backend`.
        arguments: arguments of the trainer's constructor, by name.

    Attributes:
        forward_states: one `ForwardState` per model that scores, the policy's first.
        comparison, certificate: see `exactness.py`.
        filters: the sampling filters.
        engine: rlkernel's engine; None: vLLM samples, or, inexactly, transformers' generate.
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
        self.forward_states: list[ForwardState] = []
        self.masters: dict[Tensor, Tensor] = {}
        self.comparison = Comparison()
        self.certificate = Certificate(settings.rl_kernel_check_steps, settings.rl_kernel_recheck_every, self.strict)
        self.filters = Filters(1.0)
        # One for each mode, because an evaluation may come between the updates of a generation.
        self._generations = {"train": Generation(), "eval": Generation()}
        self._deal_seeds = GenerationSeeds()
        self._prepared: list[tuple[Any, Any]] = []  # models, and the instance's own forward before, or None
        self._logged: set[str] = set()
        self.own_optimizer = True
        self.inputs: dict[str, Any] | None = None
        self.adapter: Any = None
        self._check(arguments)

    # Settings

    def report_inexact(self, why: str) -> None:
        """Reports that exactness is lost: raises in strict mode, else logs each reason once.

        Raises:
            ExactnessLostError: in strict mode.
        """
        if self.strict:
            raise ExactnessLostError(f"use_rl_kernel_backend: {why} (rl_kernel_strict=False logs this and continues)")
        if why not in self._logged:
            logger.warning("rlkernel: not exact: %s", why)
        self._logged.add(why)

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
                "use_rl_kernel_backend: fp16_full_eval and bf16_full_eval cast the model at an evaluation and leave it "
                "cast; leave them out: it is evaluated in the dtype of training"
            )
        if s.neftune_noise_alpha is not None and self.samples:
            raise ExactnessLostError(
                "use_rl_kernel_backend: neftune_noise_alpha adds noise to the embeddings in training but not in the "
                "rollout; leave it out"
            )
        self._check_adapters(arguments)
        if arguments.get("quantization_config") is not None or "quantization_config" in kwargs:
            self.report_inexact("a quantized model has other weights in training than in vLLM")
        if s.optim not in STANDARD:
            self.own_optimizer = False
            self.report_inexact(
                f"optim={s.optim!s} steps the weights without fp32 masters; use one of {', '.join(STANDARD)}"
            )
        given = (arguments.get("optimizers") or (None, None))[0] or arguments.get("optimizer_cls_and_kwargs")
        if given is not None:
            self.own_optimizer = False
            kind = given[0] if isinstance(given, tuple) else type(given)
            self.report_inexact(
                f"the given optimizer {kind.__name__} steps the weights without fp32 masters; leave it out and set "
                f"optim to one of {', '.join(STANDARD)}"
            )
        self._check_precision(os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")  # set by accelerate launch
        if self.samples:
            self._check_sampling(arguments)
        self.dtype = weight_dtype(s)
        if s.rl_kernel_dtype == "float32" and isinstance(self.model_given, torch.nn.Module):
            self.dtype = next(self.model_given.parameters()).dtype

    def _check_adapters(self, arguments: dict[str, Any]) -> None:
        configs = [arguments.get("peft_config"), *getattr(self.model_given, "peft_config", {}).values()]
        for config in configs:
            if config is not None and str(getattr(config, "peft_type", "")).rpartition(".")[2] != "LORA":
                raise ExactnessLostError(
                    f"use_rl_kernel_backend: adapters of {type(config).__name__} are not supported; rlkernel supports "
                    "plain LoRA, which can be merged into an engine's weights: use peft.LoraConfig"
                )

    def _check_precision(self, mixed: str) -> None:
        if mixed != "no":
            self.report_inexact(
                f"accelerate runs mixed_precision={mixed!r} autocast; launch with mixed_precision=no, because the "
                "weights are bf16 already"
            )

    def _check_sampling(self, arguments: dict[str, Any]) -> None:
        s = self.settings
        if s.temperature <= 0:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: temperature={s.temperature}: sampling and training divide logits by it; set a "
                "positive value"
            )
        self.filters = Filters(s.temperature, max(s.top_k or 0, 0), 1.0 if s.top_p is None else s.top_p, s.min_p or 0.0)
        ours = not s.use_vllm and self._engine_samples()
        self.certificate.rebuilds = self.filters.active and not ours
        if ours:
            return
        if s.repetition_penalty != 1.0:
            self.report_inexact(
                "repetition_penalty changes the sampled distribution, and the trainer scores without it"
            )
        if getattr(s, "vllm_structured_outputs_regex", None):
            self.report_inexact("vllm_structured_outputs_regex masks tokens that the trainer's log-probabilities count")
        if s.use_vllm and 0 < s.temperature < _MIN_TEMPERATURE:
            self.report_inexact(f"temperature={s.temperature}: vLLM raises it to {_MIN_TEMPERATURE}; set that or more")
        harmless = _HARMLESS if s.use_vllm else {*_HARMLESS, "logprobs"}
        changed = sorted(set(s.generation_kwargs or {}) - harmless)
        if changed:
            self.report_inexact(f"generation_kwargs {', '.join(changed)}: the trainer's log-probabilities ignore them")
        if s.use_vllm and s.vllm_model_impl == "transformers":
            self.report_inexact("vllm_model_impl='transformers' builds layers that rlkernel_vllm does not replace")

    def _engine_samples(self) -> bool:
        """Whether rlkernel's engine samples every turn, which is the default without vLLM.

        Under a user's `rollout_func` it only samples the turns after a tool's answer, for which TRL calls the trainer.

        Raises:
            ExactnessLostError: the engine does not support the configuration, and the user passed it as
                `rollout_func` or strict mode is on.
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
            self.report_inexact(f"{refused}, or sample inexactly with transformers' generate")
        elsewhere = [n for n in ("use_transformers_continuous_batching", "cache_implementation") if getattr(s, n, None)]
        if elsewhere and not refused:
            logger.warning("rlkernel: %s ignored, because rlkernel's engine samples", ", ".join(elsewhere))
        return not refused

    # Construction

    @contextlib.contextmanager
    def construction(self, trainer_class: type) -> Iterator[None]:
        """A block for TRL's constructor: prepares every model that gets a fused head, and vLLM gets the plugin."""
        from rlkernel_trl import vllm

        module = sys.modules[trainer_class.__module__]
        original = getattr(module, "add_fused_lm_head", None)
        if original is None:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: TRL {trl.__version__} computes log-probabilities differently from TRL 1.16, "
                "which rlkernel_trl supports: pip install 'trl>=1.16,<1.17'"
            )

        def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
            self._prepared.append((model, model.__dict__.get("forward")))
            self.prepare(model)
            original(model, *args, **kwargs)
            temperature = args[0] if args else kwargs.get("temperature", 1.0)
            state = ForwardState(strict=self.strict)
            install(model, state, temperature=temperature, outputs=kwargs.get("outputs", ("log_probs",)))
            self.forward_states.append(state)

        cast = getattr(self.settings, "cast_lm_head_to_fp32", False)
        if cast:
            self.settings.cast_lm_head_to_fp32 = False
            logger.warning(
                "rlkernel: cast_lm_head_to_fp32 is ignored: logits are fp32 sums already, and the head's weight stays "
                "%s, as in the rollout",
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
        """Rounds a model's weights and applies rlkernel to it.

        Raises:
            UnsupportedModelError: rlkernel does not support the model, strict or not.
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
        # LoRA is merged, as in vLLM; its dropout is allowed only where there is no rollout to equal.
        options: dict[str, Any] = {"adapters": "merged", "lora_dropout": not self.samples}
        options["tp_leaves"] = self.settings.rl_kernel_tp_leaves
        apply(model, **options)
        rounded = round_weights(model, self.dtype)
        if rounded:
            self.masters.update(rounded)
            apply(model, **options)  # joins the rounded weights, new tensors

    def undo(self) -> None:
        """Restores forwards and weights of the given models after a constructor that failed.

        Weights that are not trained (the base of an adapter) stay rounded, because their fp32 values are not kept.
        """
        from rlkernel_transformers import UnsupportedModelError, remove

        for model, forward in reversed(self._prepared):
            model.__dict__.pop("forward", None)
            with contextlib.suppress(UnsupportedModelError):  # a refused model has nothing to remove
                remove(model)
            if forward is not None:
                model.forward = forward
        for parameter, master in self.masters.items():
            parameter.data = master
        self._prepared.clear()
        self.masters.clear()

    def attach(self, trainer: Any) -> None:
        """The part of construction that needs the constructed trainer."""
        from rlkernel_trl import vllm

        self._check_precision(trainer.accelerator.mixed_precision)
        self.certificate.reports = trainer.accelerator.is_main_process
        trainer.add_callback(_BeforeUpdate(self, trainer))
        if self.samples and self.settings.use_vllm:
            vllm.attach(self, trainer)
        self._prepared.clear()

    # One generation

    def begin(self, trainer: Any, computes_old: bool, rows: int) -> Generation:
        """Starts a generation.

        Args:
            computes_old: whether TRL's first forward in it computes old log-probabilities.
            rows: number of completions of each process.
        """
        self.certificate.skips = computes_old
        new = Generation(
            step=trainer.state.global_step,
            expects_old=computes_old,
            may_skip=computes_old and self.certificate.may_skip(),
            skipped=False if computes_old else None,
            open=True,
            rows=rows,
        )
        self._generations[_mode(trainer)] = new
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.adapter = model.active_adapter if is_peft_model(model) else None
        return new

    def deal(self, trainer: Any, output: dict[str, Any], micro_batches: int) -> list[dict[str, Any]]:
        """This process's micro-batches of the last generation, with its kept sets."""
        generation = self.generation(trainer)
        output["rl_kernel_row"] += trainer.accelerator.process_index * generation.rows
        if generation.kept is not None:
            generation.kept = gather_kept(generation.kept, trainer.accelerator)
        seed = self._deal_seeds.next(trainer)
        return deal(output, trainer.accelerator, micro_batches=micro_batches, seed=seed)

    @contextlib.contextmanager
    def policy(self, trainer: Any) -> Iterator[None]:
        """A block with the policy's adapters active, where TRL has disabled them or activated the reference's."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not is_peft_model(model):
            yield
            return
        disabled = any(getattr(module, "disable_adapters", None) is True for module in model.modules())
        before = model.active_adapter
        model.base_model.enable_adapter_layers()
        model.set_adapter(self.adapter)
        try:
            yield
        finally:
            model.set_adapter(before)
            if disabled:
                model.base_model.disable_adapter_layers()

    def generation(self, trainer: Any) -> Generation:
        """The last generation, of training or of evaluation."""
        return self._generations[_mode(trainer)]

    def close(self, trainer: Any) -> Verdict:
        """Logs the verdict on the tokens compared since the last call. Called before the optimizer's step.

        Raises:
            MismatchError: a token differs, in strict mode.
            ExactnessLostError: no token of a new generation was compared, in strict mode.
        """
        metrics, generation = trainer._metrics[_mode(trainer)], self.generation(trainer)
        skipped = generation.skipped
        if self.samples and self.comparison.empty and generation.step == trainer.state.global_step:
            self.report_inexact(
                "no sampled token was compared with the training forward: "
                + (
                    "the rollout returned no log-probabilities"
                    if generation.sampled is None
                    else f"{type(trainer).__name__} does not score the batch with the trainer's "
                    "_get_per_token_logps_and_entropies; call it, or super()'s method if you override it"
                )
            )
        verdict = self.comparison.close(trainer.accelerator.gather)
        if verdict.tokens:
            metrics["rlkernel/exact_frac"].append(verdict.exact_frac)
            metrics["rlkernel/mismatch_tokens"].append(verdict.mismatch_tokens)
            metrics["rlkernel/drift_max"].append(verdict.drift_max)
            if skipped is not None:
                metrics["rlkernel/old_logps_skipped"].append(float(skipped))
            if skipped or not self.logged_by_trl:
                metrics["sampling/sampling_logp_difference/mean"].append(verdict.mean)
                metrics["sampling/sampling_logp_difference/max"].append(verdict.drift_max)
        metrics["rlkernel/fallbacks"].append(sum(state.fallbacks for state in self.forward_states))
        for state in self.forward_states:
            state.fallbacks = 0
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
    """Starts exact updates, and closes the comparison before the optimizer's step."""

    def __init__(self, backend: Backend, trainer: Any):
        self.backend, self.trainer = backend, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.backend.own_optimizer and self.trainer._master_adamw() is None:
            found = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
            self.backend.report_inexact(
                f"the trainer's optimizer is a {type(found).__name__}, set after construction or by an override of "
                "create_optimizer, which steps the weights without fp32 masters; let the trainer create it"
            )
        self.trainer.start_updates()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.backend.close(self.trainer)
