"""Checks a `VllmConfig` that requests rlkernel, names every setting that cannot be exact, and sets what follows.

`findings` is a pure function of the configuration, so the front end, the engine and every worker agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rlkernel import ops
from rlkernel.models.config import ConfigError, ModelConfig, from_hf
from rlkernel.models.families import MISSING
from rlkernel.models.vision_config import VISION_FAMILIES, MultimodalConfig, from_hf_multimodal
from rlkernel_vllm import settings
from rlkernel_vllm.settings import ATTENTION, CONTRACT, LEAVES, MODE, Settings

VERSIONS = ((0, 24), (0, 32))  # first and last supported version of vLLM
ARCHITECTURES = (
    *("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    *(family.architecture for family in VISION_FAMILIES.values()),
)


class Finding(NamedTuple):
    """A setting, or a module of the model, that cannot be exact, and why."""

    setting: str
    reason: str


class UnsupportedError(ValueError):
    """The request cannot be computed exactly; the message names every setting and module."""


def prepare(vllm_config: Any, requested: Settings) -> None:
    """Refuses what cannot be exact (strict mode), and makes the settings that follow from the flag.

    Raises:
        UnsupportedError: there are findings in strict mode; in any mode, the contract is not the requested one, or the
            plugin's hooks do not fit this vLLM.
    """
    if settings.hook_error:
        first, last = (".".join(map(str, version)) for version in VERSIONS)
        raise UnsupportedError(
            f"vllm: the plugin does not fit this version, use one of {first} to {last}: {settings.hook_error}"
        )
    settings.write(vllm_config, requested)
    contract = ops.attention_contract(requested.attention)
    if requested.contract not in (None, contract):
        raise UnsupportedError(
            f"{CONTRACT} is {requested.contract!r}, and this rlkernel computes {contract!r}; "
            "use one rlkernel and one attention variant in the engine and in the trainer"
        )
    found = list(findings(vllm_config, requested))
    refuse(found, requested)
    vllm_config.model_config.disable_cascade_attn = True
    media: Any = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(media, "mm_device_do_normalize", False):
        media.mm_device_do_normalize = False  # the processor normalises pixels, in the trainer's arithmetic
    if _on_cuda() and not {"kv_cache_dtype", "attention_config.backend"} & {name for name, _ in found}:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM


def refuse(found: list[Finding], requested: Settings) -> None:
    """Raises UnsupportedError for findings in strict mode."""
    if found and requested.mode == "strict":
        lines = "\n".join(f"- {name}: {reason}" for name, reason in found)
        raise UnsupportedError(
            f"{settings.FLAG}: log-probabilities cannot be exact with\n{lines}\n"
            f'Change these, or set "{MODE}": "audit" in additional_config to run and have them reported.'
        )


def request_problem(params: Any) -> str | None:
    """Why a trainer cannot compute a request's log-probabilities; None: it can."""
    if getattr(params, "structured_outputs", None) is None or params.logprobs is None:
        return None
    return (
        f"{settings.FLAG}: structured_outputs with logprobs: vLLM removes the tokens that a grammar forbids from the "
        "logits before it computes log-probabilities, so these are not the trainer's; leave one of both out "
        f'("{MODE}": "audit" in additional_config returns them)'
    )


def findings(vllm_config: Any, requested: Settings) -> Iterator[Finding]:
    """Settings of the configuration that cannot be exact."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    yield from _of_vllm()
    yield from _of_model(model)
    if getattr(model, "quantization", None) is not None:
        yield Finding("quantization", f"{model.quantization!r}; weights must be in the trainer's dtype")
    if vllm_config.speculative_config is not None:
        yield Finding("speculative_config", "rejection sampling changes which distribution a token is drawn from")
    if vllm_config.lora_config is not None:
        yield Finding("enable_lora", "vLLM's adapter kernels are not batch-invariant; merge adapters first")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype != "auto" and cache_dtype != str(model.dtype).removeprefix("torch."):
        yield Finding("kv_cache_dtype", f"{cache_dtype!r}; keys and values must keep the model's dtype, 'auto'")
    if getattr(vllm_config, "watermark_config", None) is not None:
        yield Finding("watermark_config", "a watermark changes which distribution a token is drawn from")
    yield from _of_tensor_parallel(vllm_config, requested)
    for name, why in _PARALLEL.items():
        size = getattr(parallel, name, 1)
        if size > 1:
            yield Finding(name, f"{size}; {why}; use 1")
    if getattr(parallel, "enable_expert_parallel", False):
        yield Finding("enable_expert_parallel", "there are no experts in a supported model")
    yield from _of_attention(vllm_config, requested)


_CONTEXT_PARALLEL = "vLLM adds attention over parts of a sequence in another order"
_PARALLEL = {
    "pipeline_parallel_size": "the plugin looks for all of the model's weights in one worker",
    "decode_context_parallel_size": _CONTEXT_PARALLEL,
    "prefill_context_parallel_size": _CONTEXT_PARALLEL,
}


def _of_tensor_parallel(vllm_config: Any, requested: Settings) -> Iterator[Finding]:
    ranks, leaves = vllm_config.parallel_config.tensor_parallel_size, requested.tp_leaves
    if leaves % ranks:
        yield Finding(
            "tensor_parallel_size",
            f"{ranks} does not divide {LEAVES}={leaves}; set {LEAVES} to a multiple in additional_config and in the "
            "trainer (8 serves 1, 2, 4 and 8 GPUs)",
        )
    if ranks > 1 and getattr(vllm_config.model_config.hf_config, "model_type", None) in VISION_FAMILIES:
        yield Finding("tensor_parallel_size", f"{ranks}; the vision encoder is computed by one rank; use 1")
    if ranks > 1 and requested.attention != "split":
        yield Finding(ATTENTION, f"{requested.attention!r} is certified for the heads of one GPU; use 'split'")
    try:
        replace(model_config(vllm_config.model_config), tp_leaves=leaves)
    except ConfigError as error:
        if LEAVES in str(error):  # other reasons are findings of the model
            yield Finding(LEAVES, str(error))


def _of_vllm() -> Iterator[Finding]:
    import vllm
    from vllm.platforms import current_platform

    parts = str(vllm.__version__).split(".")
    number = tuple(int(part) if part.isdecimal() else -1 for part in parts[:2])
    if not VERSIONS[0] <= number <= VERSIONS[1]:
        first, last = (".".join(map(str, version)) for version in VERSIONS)
        yield Finding("vllm", f"version {vllm.__version__}; the plugin is tested on {first} to {last}, install one")
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield Finding("device", f"{current_platform.device_type} is neither CUDA nor a CPU")


_TEXT_PARTS = tuple(f"{family}_text" for family in VISION_FAMILIES)


def _of_model(model: Any) -> Iterator[Finding]:
    kind = getattr(model, "runner_type", "generate")
    if kind != "generate":
        yield Finding("runner", f"{kind!r}; only generation is supported")
    if getattr(model, "is_encoder_decoder", False):
        yield Finding("model", "an encoder-decoder model; only decoders are supported")
    if getattr(model, "use_mla", False):
        yield Finding("model", "multi-head latent attention (MLA) is not supported")
    if getattr(model.hf_config, "model_type", None) in _TEXT_PARTS:
        return  # vLLM builds it from the configuration of the whole model, which was checked
    names = list(getattr(model, "architectures", None) or getattr(model.hf_config, "architectures", None) or [])
    if not any(name in ARCHITECTURES for name in names):
        why = MISSING.get(str(getattr(model.hf_config, "model_type", None)))
        yield Finding(
            "model",
            f"architecture {', '.join(names)}{': ' + why if why else ''}; expected one of {', '.join(ARCHITECTURES)}",
        )
        return
    if getattr(model, "model_impl", "auto") == "transformers":
        yield Finding("model_impl", "'transformers'; expected vLLM's own model, 'auto' or 'vllm'")
    try:
        config = model_config(model)
    except ConfigError as error:
        yield Finding("model", str(error))
        return
    yield from _of_keys(model, config)
    yield from _of_media(model)


# Keys of config.json that vLLM's models of these architectures use and transformers' ignore -> values without effect.
_KEYS_OF_VLLM: dict[str, tuple[Any, ...]] = {
    "bias": (None, False),
    "qkv_bias": (None, False),
    "logit_scale": (None, 1, 1.0),
    "is_causal": (None, True),
    "dual_chunk_attention_config": (None,),
    "llama_4_scaling": (None,),
    "ada_rms_norm_t_cond": (None, False),
}


def _of_keys(model: Any, config: ModelConfig) -> Iterator[Finding]:
    """Keys of the configuration that vLLM's model interprets differently from transformers'."""
    for key, without_effect in _KEYS_OF_VLLM.items():
        value = getattr(model.hf_config, key, None)
        if value not in without_effect:
            yield Finding("model", f"{key}={value!r} in config.json: vLLM computes with it, transformers does not")
    if config.model_type == "qwen3" and config.attention_bias:
        yield Finding("model", "attention_bias=True: vLLM's Qwen3 leaves out the bias of the output projection")
    if model.max_model_len > config.max_position_embeddings:
        yield Finding(
            "max_model_len",
            f"{model.max_model_len} exceeds max_position_embeddings={config.max_position_embeddings}, the trainer's "
            "limit; lower it, or raise max_position_embeddings in config.json on both sides",
        )
    if len(set(config.windows)) > 1:
        yield Finding("model", "layer_types has sliding and full attention: vLLM's model has one window for all layers")
    window = model.get_sliding_window()
    if window is not None and config.family.window == "none":
        yield Finding(
            "model",
            f"sliding_window={window} in config.json: vLLM attends to that many keys, transformers' "
            f"{config.family.architecture} to all; remove the key",
        )


def _of_media(model: Any) -> Iterator[Finding]:
    """Settings of a vision-language model that change tokens, pixels, or how the encoder runs."""
    media: Any = getattr(model, "multimodal_config", None)
    if getattr(media, "video_pruning_rate", None):
        yield Finding("video_pruning_rate", f"{media.video_pruning_rate}; the trainer has no pruned videos")
    if getattr(media, "mm_encoder_tp_mode", "weights") == "data":
        yield Finding("mm_encoder_tp_mode", "'data'; images are dealt to ranks; use 'weights' on one rank")


def _of_attention(vllm_config: Any, requested: Settings) -> Iterator[Finding]:
    if not _on_cuda():
        if requested.attention == "fa3":
            yield Finding(ATTENTION, "'fa3' runs on GPUs of compute capability 9; use 'split'")
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = vllm_config.attention_config.backend
    if backend not in (None, AttentionBackendEnum.CUSTOM):
        yield Finding("attention_config.backend", f"{backend.name}; leave it out, rlkernel has its own")
    else:
        registered = AttentionBackendEnum.CUSTOM.get_path()
        if registered != settings.BACKEND:
            yield Finding("attention_config.backend", f"another plugin registered {registered} as CUSTOM")


def model_config(model: Any) -> ModelConfig:
    """rlkernel's configuration of the model, from the Hugging Face configuration that vLLM holds.

    Raises:
        ConfigError: rlkernel's models do not support it; the message names the key.
    """
    multimodal = multimodal_config(model)
    return from_hf(_values(model), where=f"config.json of {model.model}") if multimodal is None else multimodal.text


def multimodal_config(model: Any) -> MultimodalConfig | None:
    """rlkernel's configuration of a vision-language model; None for others. Raises ConfigError as `model_config`."""
    if getattr(model.hf_config, "model_type", None) not in VISION_FAMILIES:
        return None
    return from_hf_multimodal(_values(model), where=f"config.json of {model.model}")


def _values(model: Any) -> dict[str, Any]:
    dtype = str(model.dtype).removeprefix("torch.")
    values = {**model.hf_config.to_dict(), "dtype": dtype}
    if isinstance(values.get("text_config"), dict):
        values["text_config"] = {**values["text_config"], "dtype": dtype}
    return values


def _on_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())
