"""rlkernel's own engine under GRPO and RLOO without vLLM: it samples with the trainer's own parameters.

The engine's parameters are views of the policy's, so no weights are copied or synchronized, except in layers with
LoRA, whose merged weights are computed. Its log-probabilities are compared like vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from rlkernel import ops
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.llm import CPU_CACHE_BYTES
from rlkernel.engine.table import ceil_div
from rlkernel.models import KVCache
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import from_hf
from rlkernel.models.decoder import Attention, Decoder
from rlkernel.models.vision_config import VISION_FAMILIES
from rlkernel.optim import local
from rlkernel_transformers import merged_weights
from rlkernel_transformers.joined import join
from rlkernel_transformers.support import find_model
from rlkernel_trl.errors import ExactnessLostError
from rlkernel_trl.forward import Ragged
from rlkernel_trl.seeds import GenerationSeeds, request_seeds


def decoder_of(model: Any, dtype: torch.dtype, tp_leaves: int = 1) -> Decoder:
    """A `rlkernel.models.Decoder` with the parameters of a model after `rlkernel_transformers.apply`.

    Parameters of layers with a LoRA adapter, and all under FSDP2, are uninitialized until `fill` writes them.
    """
    found = find_model(model)
    if found.config.model_type in VISION_FAMILIES:
        raise ExactnessLostError(
            "use_rl_kernel_backend: rlkernel's engine under TRL takes text alone; set use_vllm=True for a "
            "vision-language model"
        )
    settings = found.model._rlkernel
    embedding = found.model.embed_tokens.weight
    with torch.device("meta"):
        config = from_hf(found.config.to_dict(), type(found).__name__)
        decoder = Decoder(replace(config, dtype=dtype, tp_leaves=tp_leaves))
    weights = dict(found.named_parameters(remove_duplicate=False))
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    names: dict[str, list[str]] = {}
    for part in hf_layout(decoder.config):
        names.setdefault(part.parameter, []).append(part.name)
    for parameter, sources in names.items():
        owner, _, leaf = parameter.rpartition(".")
        module = decoder.get_submodule(owner)
        if not sharded and all(name in weights for name in sources):
            tensor = join([weights[name].detach() for name in sources])
        else:
            tensor = torch.empty_like(module.get_parameter(leaf), device=embedding.device)
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    settings.to(embedding.device)
    decoder._buffers["cos_sin"] = settings.cos_sin
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.variant = settings.variant
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, model: Any) -> None:
    """Updates the decoder's parameters that are copies: of merged LoRA, of weights that are not adjacent in memory,
    or of FSDP2's shards, which every process gathers."""
    parameters = dict(decoder.named_parameters())
    copies = {
        part.name: parameters[part.parameter].narrow(0, part.start, part.rows) for part in hf_layout(decoder.config)
    }
    for name, weight in merged_weights(model, decoder.config.dtype):
        if name in copies and copies[name].data_ptr() != weight.data_ptr():
            copies[name].copy_(weight)


# Names in `generation_kwargs`, vLLM's and those of transformers' generate: supported ones, and ones without an effect
# on tokens.
_LENGTH, _STOPS = ("max_tokens", "max_new_tokens"), ("stop", "stop_strings")
_SUPPORTED = frozenset({*_LENGTH, *_STOPS, "stop_token_ids", "ignore_eos"})
_WITHOUT_EFFECT = frozenset(
    {
        *("logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
        *("include_stop_str_in_output", "use_cache", "pad_token_id", "bos_token_id"),
    }
)
_STATE_BYTES = 12
"""Per trained parameter: its fp32 master and AdamW's two moments, which the first step allocates."""


class Rollout:
    """rlkernel's engine on the policy's weights. A trainer samples with it, and `rollout_func` returns one.

    Attributes:
        llm: the engine, created by the first generation.
        kept: kept sets of the last turn, one entry per completion; None without filters.
    """

    def __init__(self, **engine: Any):
        self._settings = engine
        self._seeds = GenerationSeeds()
        self.llm: LLM | None = None
        self.kept: list[Ragged] | None = None

    def refuses(self, settings: Any) -> str:
        """Why the engine cannot sample by a configuration, as a sentence; empty: it can."""
        given = settings.generation_kwargs or {}
        known = _SUPPORTED | _WITHOUT_EFFECT | ({"do_sample"} if given.get("do_sample") is True else set())
        others = ", ".join(sorted(set(given) - known))
        wrong = ["repetition_penalty"] if settings.repetition_penalty != 1.0 else []
        wrong += [f"generation_kwargs {others}"] if others else []
        if not wrong:
            return ""
        return (
            f"{' and '.join(wrong)}: rlkernel's engine takes temperature, top_p, top_k, min_p and seed from the "
            f"configuration and {', '.join(sorted(_SUPPORTED))} from generation_kwargs, nothing else; leave it out"
        )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions of the prompts in TRL's form: lists `prompt_ids`, `completion_ids` and `logprobs`."""
        if getattr(trainer, "_rl_kernel", None) is None:
            raise ExactnessLostError("rollout_func: set use_rl_kernel_backend=True in the configuration of the trainer")
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        completion_ids, logprobs = self.sample(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def sample(self, prompt_ids: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]]]:
        """A completion of each prompt with its log-probabilities; stores the kept sets in the trainer's round."""
        args = trainer.args
        given = args.generation_kwargs or {}
        filters = trainer._rl_kernel.filters
        model = trainer.accelerator.unwrap_model(trainer.model)
        stop = next((given[name] for name in _STOPS if given.get(name)), ())
        longest = next((given[name] for name in _LENGTH if given.get(name)), args.max_completion_length)
        llm = self._engine(trainer, model, prompt_ids, longest, with_texts=bool(stop))
        fill(llm.model, model)
        llm.weights_updated()
        ends = () if given.get("ignore_eos") else trainer.eos_token_ids
        generation = trainer._rl_kernel.generation(trainer)
        seeds = request_seeds(
            self._seeds.next(trainer), trainer.accelerator.process_index * generation.rows, len(prompt_ids)
        )
        params = [
            SamplingParams(
                temperature=args.temperature,
                top_k=filters.top_k,
                top_p=filters.top_p,
                min_p=filters.min_p,
                max_tokens=longest or llm.max_model_len,
                seed=seed,
                stop=stop,
                stop_token_ids=(*ends, *(given.get("stop_token_ids") or ())),
                ignore_eos=True,  # stop_token_ids has TRL's list of them
                return_kept=filters.active,
            )
            for seed in seeds
        ]
        llm.wake()
        outputs = [output.outputs[0] for output in llm.generate(prompt_ids, params)]
        llm.sleep(keep_graphs=True)  # its KV cache would take memory from training
        sets = [output.kept for output in outputs if output.kept is not None]
        device, vocabulary = llm.model.device, llm.model.config.vocab_size
        self.kept = [ops.kept_to_ids(kept.to(device), vocabulary) for kept in sets] if filters.active else None
        generation.keep(self.kept)
        return [list(output.token_ids) for output in outputs], [output.logprobs_tensor.tolist() for output in outputs]

    def _engine(
        self, trainer: Any, model: Any, prompts: list[list[int]], longest: int | None, *, with_texts: bool
    ) -> LLM:
        """The engine, created at the first generation, and again if a sequence does not fit into its cache."""
        settings = {"max_num_seqs": 256, "page_size": 16, **self._settings}
        decoder = (
            decoder_of(model, trainer._rl_kernel.dtype, trainer.args.rl_kernel_tp_leaves)
            if self.llm is None
            else self.llm.model
        )
        context, page = settings.get("max_model_len") or decoder.config.max_position_embeddings, settings["page_size"]
        needed = ceil_div(min(max(map(len, prompts)) + (longest or context), context), page)
        if self.llm is not None and ("num_pages" in settings or needed <= self.llm.num_pages):
            return self.llm
        if "num_pages" not in settings:
            self.llm = None  # frees its cache
            wanted = ceil_div(context, page) * settings["max_num_seqs"]
            affordable = _cache_bytes(trainer, decoder) // KVCache.page_bytes(decoder.config, page)
            settings["num_pages"] = max(needed, min(wanted, affordable))
        self.llm = LLM(decoder, trainer._tokenizer if with_texts else None, **settings)
        return self.llm


def _cache_bytes(trainer: Any, decoder: Decoder) -> int:
    """Bytes for the KV cache: on a GPU the fraction that TRL gives vLLM, at most half of what training leaves free."""
    if decoder.device.type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(decoder.device)
    free += torch.cuda.memory_reserved(decoder.device) - torch.cuda.memory_allocated(decoder.device)
    optimizer = trainer._master_adamw()
    if optimizer is None or not optimizer.state:
        free -= _STATE_BYTES * sum(local(p).numel() for p in trainer.model.parameters() if p.requires_grad)
    return int(max(0, min(total * trainer.args.vllm_gpu_memory_utilization, free / 2)))


def rollout_func(**engine: Any) -> Rollout:
    """rlkernel's engine with explicit settings, for `GRPOTrainer(rollout_func=...)`.

    Args:
        engine: settings of `rlkernel.engine.LLM`: `max_num_seqs`, `max_num_batched_tokens`, `num_pages`,
            `max_model_len`, `cuda_graphs` and others.
    """
    return Rollout(**engine)
