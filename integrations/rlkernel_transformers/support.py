"""What `apply` accepts: the families of `rlkernel.models`, as transformers itself builds them.

Everything else is refused here; the message names the setting and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from rlkernel.models import ModelConfig
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import ConfigError, from_hf
from rlkernel.models.families import FAMILIES, MISSING
from rlkernel.models.vision_config import VISION_FAMILIES, MultimodalConfig, from_hf_multimodal, hf_names


class UnsupportedModelError(ValueError):
    """A model or setting that cannot be computed exactly; the message names it and says what to do."""


class Method(partial[Any]):
    """A function bound to one module, like a bound method; pickle finds it by the function's own name."""

    @property
    def __func__(self) -> Any:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0]


def has_hooks(module: Any) -> bool:
    """Whether a module has hooks, of torch or of accelerate."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "_hf_hook" in module.__dict__


def check_call(model: Any) -> None:
    """Raises UnsupportedModelError if a module was replaced after `apply`, or if DDP would miss gradients that are
    accumulated into `main_grad`."""
    if is_dynamo_compiling():
        return
    decoder = decoder_of(model)
    parts = [model.lm_head, decoder.embed_tokens, decoder.norm]
    for layer in decoder.layers:
        parts += (layer.input_layernorm, layer.post_attention_layernorm)
        if decoder._rlkernel.qk_norm:
            attention = layer.self_attn
            parts += (attention.q_norm, attention.k_norm)
    for part in parts:
        if part._parameters and "forward" not in part.__dict__:  # a wrapper (FSDP) has no parameters of its own
            raise UnsupportedModelError(
                f"a {_kind(part)} was put into the model after rlkernel_transformers.apply, and would run stock "
                "kernels; call apply(model) again"
            )
    if "zero_grad" not in model.__dict__ or not torch.is_grad_enabled():
        return
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and ddp.require_backward_grad_sync:
        raise UnsupportedModelError(
            "DistributedDataParallel does not see main_grads: create a rlkernel_transformers.GradientTree(ddp), which "
            "sums them over the ranks, and call its backward and finish (rlkernel_transformers.Trainer does)"
        )


def find_model(model: nn.Module) -> Any:
    """The causal language model of transformers inside wrappers (PEFT, DDP, FSDP, torch.compile).

    Raises:
        UnsupportedModelError: there is none of a supported family.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; pass a loaded one, AutoModelForCausalLM.from_pretrained(...)"
        )
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            kind = getattr(module.config, "model_type", None)
            known = {name: family.architecture for name, family in FAMILIES.items()}
            known |= {name: family.architecture for name, family in VISION_FAMILIES.items()}
            if any(c.__name__ == known.get(str(kind)) for c in type(module).__mro__):
                return module
            reason = MISSING.get(str(kind), "")
            raise UnsupportedModelError(
                f"{type(module).__name__} (model_type {kind!r}) is not supported"
                f"{': ' + reason if reason else ''}; supported: "
                f"{', '.join(known.values())}"
            )
    raise UnsupportedModelError(f"{type(model).__name__} contains no model of transformers")


def decoder_of(model: Any) -> Any:
    """The decoder of a causal language model, which is a part of a vision-language model."""
    return getattr(model.model, "language_model", model.model)


def read_multimodal(model: Any) -> MultimodalConfig | None:
    """Configuration of a vision-language model; None for others. Raises UnsupportedModelError as `read_config`."""
    if model.config.model_type not in VISION_FAMILIES:
        return None
    try:
        return from_hf_multimodal(model.config.to_dict(), f"config of {type(model).__name__}")
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from None


def read_config(model: Any) -> ModelConfig:
    """The configuration of the model's decoder. Raises UnsupportedModelError if our ops do not support it."""
    if (multimodal := read_multimodal(model)) is not None:
        return multimodal.text
    # The class decides: a checkpoint of the base model alone, or of a reward model, names another architecture.
    architecture = FAMILIES[model.config.model_type].architecture
    try:
        return from_hf({**model.config.to_dict(), "architectures": [architecture]}, f"config of {type(model).__name__}")
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from None


def check_wrappers(model: nn.Module, adapters: str) -> None:
    """Raises UnsupportedModelError for PEFT's prompt learning where an engine is to compute the same numbers."""
    for module in model.modules() if adapters == "merged" else ():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            kind = type(module.active_peft_config).__name__
            raise UnsupportedModelError(
                f"{kind}: learned prefixes and prompts change the inputs of every call, and an engine does not have "
                "them; use LoRA, or adapters='low-rank' where nothing is rolled out"
            )


def check(model: Any, config: ModelConfig, *, lora_dropout: bool = False) -> None:
    """Raises UnsupportedModelError for other libraries' kernels, quantised or unknown layers, weights that the
    architecture does not have, and dropout (except that of adapters if `lora_dropout`)."""
    if getattr(model, "use_kernels", False):
        raise UnsupportedModelError(
            "use_kernels=True replaced layers by kernels from the Hub; load the model without it to use rlkernel"
        )
    for name, module in model.named_modules():
        where = _origin(module)
        if "liger" in where:
            raise UnsupportedModelError(
                f"{name or 'the model'} runs Liger kernels ({where}); set use_liger_kernel=False and load the model "
                "again"
            )
        if type(module).__module__.startswith(("bitsandbytes", "auto_gptq", "awq", "torchao", "compressed_tensors")):
            raise UnsupportedModelError(
                f"{name} is a quantised layer ({type(module).__name__}); load the model without quantization_config"
            )
        if isinstance(module, nn.Dropout) and module.p > 0 and not (lora_dropout and ".lora_dropout." in name):
            raise UnsupportedModelError(
                f"{name} is a dropout of {module.p}, which a rollout does not have; set it to 0 (lora_dropout=0.0 for "
                "an adapter)"
            )
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if sharded and not any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UnsupportedModelError(
            "the parameters are sharded by tensor parallelism (tp_plan), whose sums over ranks have another order; "
            "load the model without tp_plan, and shard it with FSDP2 (fully_shard)"
        )
    if getattr(model, "_hf_hook", None) is not None or hasattr(model, "hf_device_map"):
        devices = {str(p.device) for p in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"device_map spreads the model over {', '.join(sorted(devices))}; load it on one device"
            )
    for name, module, kind in (
        ("lm_head", model.lm_head, nn.Linear),
        ("embed_tokens", decoder_of(model).embed_tokens, nn.Embedding),
    ):
        if not isinstance(module, kind):
            raise UnsupportedModelError(
                f"{name} is a {_kind(module)}; take it out of target_modules and modules_to_save: rlkernel "
                "computes adapters on the linear layers of attention and MLP only"
            )
    for index, layer in enumerate(decoder_of(model).layers):
        for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", _MLP)):
            for name in names:
                if not hasattr(getattr(layer, block), name):
                    raise UnsupportedModelError(
                        f"layer {index} has no {block}.{name}; transformers {_version()} builds {type(layer).__name__} "
                        "in a way that rlkernel does not know"
                    )
                projection = getattr(getattr(layer, block), name)
                if not isinstance(projection, nn.Linear) and not hasattr(projection, "base_layer"):
                    raise UnsupportedModelError(
                        f"layer {index} has a {_kind(projection)} as {block}.{name}; rlkernel computes an nn.Linear, "
                        "or an adapter around one: put the Linear back"
                    )
    _check_weights(model, config)
    dtypes = {p.dtype for n, p in model.named_parameters() if p.is_floating_point() and "lora_" not in n}
    if len(dtypes) > 1:
        raise UnsupportedModelError(
            f"the parameters have dtypes {', '.join(sorted(str(d) for d in dtypes))}; cast the model to one, "
            "model.to(torch.bfloat16)"
        )


def _check_weights(model: Any, config: ModelConfig) -> None:
    """Raises UnsupportedModelError if a model's weights, except LoRA's, are not those of its architecture: our forwards
    would ignore them."""
    wanted = {part.name for part in hf_layout(config)} | {"lm_head.weight"}
    if (multimodal := read_multimodal(model)) is not None:
        wanted = hf_names(multimodal) | {"lm_head.weight"}
        adapted = [name for name, module in model.model.visual.named_modules() if hasattr(module, "base_layer")]
        if adapted:
            raise UnsupportedModelError(
                f"the vision encoder has adapters ({adapted[0]}), which its forward would ignore; leave it out of "
                "target_modules"
            )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if ".lora_" not in name]
    present = {re.sub(r"\b(base_layer|_orig_mod|_checkpoint_wrapped_module)\.", "", name) for name in names}
    for odd, which in ((present - wanted, "has weights that its architecture does not"), (wanted - present, "lacks")):
        if odd:
            raise UnsupportedModelError(
                f"the model {which}: {', '.join(sorted(odd)[:3])}{' ...' if len(odd) > 3 else ''}; rlkernel computes "
                f"{config.family.architecture} as configured, and LoRA on the linear layers of attention and MLP: "
                "remove other adapters, modules_to_save and biases"
            )


def check_chunks(config: ModelConfig, chunks: Any) -> None:
    """Raises UnsupportedModelError unless `tp_leaves` divides K of o_proj and down_proj as `ops.linear` needs it."""
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise UnsupportedModelError(f"tp_leaves is {chunks!r}; expected an integer, 1 for a single chain")
    try:
        replace(config, tp_leaves=chunks)
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from None


def _kind(module: nn.Module) -> str:
    """The module's class with its package, because PEFT has a Linear too."""
    return f"{type(module).__module__}.{type(module).__name__}"


_MLP = ("gate_proj", "up_proj", "down_proj")


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _origin(module: nn.Module) -> str:
    """Python module of the code that computes a layer."""
    forward = module.__dict__.get("forward", type(module).forward)
    return str(getattr(forward, "__module__", "") or "")


def check_dtype(dtype: torch.dtype) -> None:
    """Raises UnsupportedModelError unless ops compute in this dtype."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(f"the parameters are {dtype}; rlkernel computes in float32, bfloat16 and float16")
