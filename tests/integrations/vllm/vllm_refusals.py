"""What the plugin refuses before an engine is created: settings, models, keys, a vLLM without its hooks' targets.

`vllm_side.py` runs `refusals`, `checks` and `broken`, each with the folder of a model.
"""

from __future__ import annotations

import os
from typing import Any

KEYS_OF_VLLM: dict[str, Any] = {
    "bias": True, "qkv_bias": True, "logit_scale": 2.0, "is_causal": False, "llama_4_scaling": {"beta": 0.1},
    "dual_chunk_attention_config": {"chunk_size": 8}, "sliding_window": 16,
}  # fmt: skip


def refusals(folder: str) -> dict[str, Any]:
    """Refusals of the configuration, by setting; no engine is created."""
    from vllm import EngineArgs

    from rlkernel_vllm.config import UnsupportedError

    flag = {"use_rl_kernel_backend": True}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    out: dict[str, Any] = {}
    for name, changes in {
        "quantization": {"quantization": "fp8"},
        "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
        "enable_lora": {"enable_lora": True},
        "tensor_parallel_size that does not divide tp_leaves": {"tensor_parallel_size": 2},
        "tp_leaves that do not divide K": {
            "additional_config": {**flag, "tp_leaves": 8},
            "hf_overrides": {"intermediate_size": 100},
        },
        "pipeline_parallel_size": {"pipeline_parallel_size": 2},
        "speculative_config": {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        },
        "rl_kernel_attention": {"additional_config": {**flag, "rl_kernel_attention": "fa3"}},
        "rl_kernel_contract": {"additional_config": {**flag, "rl_kernel_contract": "rlk-0"}},
        "rl_kernel_mode": {"additional_config": {**flag, "rl_kernel_mode": "loose"}},
        "yarn rope": {"hf_overrides": {"rope_parameters": yarn}},
        **{f"{key} in config.json": {"hf_overrides": {key: value}} for key, value in KEYS_OF_VLLM.items()},
        "nothing": {},
    }.items():
        arguments = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 64, "additional_config": flag}
        try:
            EngineArgs(**{**arguments, **changes}).create_engine_config()
            out[name] = "no error"
        except UnsupportedError as error:
            out[name] = str(error)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    out.update(architectures(folder))
    return out


def architectures(folder: str) -> dict[str, str]:
    """Other models' configurations put into an accepted one, because vLLM starts a process to inspect a new model."""
    import copy

    import transformers
    from vllm import EngineArgs

    from rlkernel_vllm.config import UnsupportedError, prepare
    from rlkernel_vllm.settings import Settings

    stock = EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    out = {}
    for name, kind in {
        "Gemma 2": "Gemma2", "Gemma 3": "Gemma3Text", "mixture of experts": "Qwen3Moe",
        "multi-head latent attention (MLA)": "DeepseekV2",
    }.items():  # fmt: skip
        given = copy.deepcopy(stock)
        given.model_config.hf_config = getattr(transformers, f"{kind}Config")(num_hidden_layers=1)
        given.model_config.model_arch_config.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
        try:
            prepare(given, Settings(enabled=True))
            out[name] = "no error"
        except UnsupportedError as error:
            out[name] = str(error)
    return out


def checks(folder: str) -> dict[str, Any]:
    """More refusals before an engine is created, and the class of `LLM`."""
    from types import SimpleNamespace

    import vllm

    import rlkernel_vllm
    from rlkernel_vllm.config import findings
    from rlkernel_vllm.convert import Conversion
    from rlkernel_vllm.plugin import replace_sampler
    from rlkernel_vllm.settings import Settings

    class Mine(rlkernel_vllm.LLM):
        pass

    out: dict[str, Any] = {"class": issubclass(Mine, vllm.LLM)}
    both = {"use_rl_kernel_backend": True, "additional_config": {"use_rl_kernel_backend": "off"}}
    for name, changes in {
        "unwrapped": {"use_rl_kernel_backend": True, "kv_cache_dtype": "fp8"},
        "argument": {"use_rl_kernel_backend": "maybe"},
        "both": both,
        "typed": {"additional_config": {"use_rl_kernel_backnd": True}},
    }.items():
        try:
            Mine(model=folder, skip_tokenizer_init=True, max_model_len=64, **changes)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    os.environ["RLKERNEL_VLLM_ATTENTION"] = "fa3"
    try:
        Mine(model=folder, skip_tokenizer_init=True, max_model_len=64, use_rl_kernel_backend=True)
    except Exception as error:
        out["environment"] = f"{type(error).__name__}: {error}"
    del os.environ["RLKERNEL_VLLM_ATTENTION"]
    given = vllm.EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    given.watermark_config = object()
    version, vllm.__version__ = vllm.__version__, "0.33.1"
    out["findings"] = list(findings(given, Settings(enabled=True)))
    vllm.__version__ = version
    runner = SimpleNamespace(sampler=SimpleNamespace(), get_model=lambda: SimpleNamespace(rlkernel=Conversion()))
    try:
        replace_sampler(runner, Settings(enabled=True))
    except rlkernel_vllm.UnsupportedError as error:
        out["sampler"] = str(error)
    replace_sampler(runner, Settings(enabled=True, mode="audit"))
    out["windows"] = windows(given)
    return out


def windows(vllm_config: Any) -> list[list[Any]]:
    """Layers with another window than the architecture's: two with 16 and 64 keys, sequences of up to 64."""
    from torch import nn

    from rlkernel_vllm.attention_cpu import CPUImpl
    from rlkernel_vllm.config import model_config
    from rlkernel_vllm.convert import window_findings

    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module(), nn.Module()])
    for layer, window in zip(model.layers, (64, 16), strict=True):
        layer.attn = nn.Module()
        layer.attn.impl = CPUImpl.__new__(CPUImpl)
        layer.attn.impl.sliding_window = window
    found = window_findings(model, model_config(vllm_config.model_config), 64)
    return [[name, 16 if " 16 keys" in why else why, None if "one of None" in why else why] for name, why in found]


def broken(folder: str) -> dict[str, Any]:
    """A vLLM without one of the functions that the plugin hooks (the caller keeps vLLM from loading it)."""
    from vllm import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    import rlkernel_vllm

    del WorkerWrapperBase.init_device
    rlkernel_vllm.register()
    arguments = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 64}
    EngineArgs(**arguments).create_engine_config()
    try:
        EngineArgs(**arguments, additional_config={"use_rl_kernel_backend": True}).create_engine_config()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}
