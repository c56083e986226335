"""rlkernel's own engine under GRPO and RLOO without vLLM: it samples from the trainer's weights where they lie.

The engine's parameters are views of the policy's, so there is no copy and no weight sync (layers with LoRA excepted,
whose merged weights are computed); its log-probabilities are compared like vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.llm import CPU_CACHE_BYTES
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.engine.table import ceil_div
from rlkernel.models import KVCache
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import from_hf
from rlkernel.models.decoder import Decoder
from rlkernel_transformers import merged_weights
from rlkernel_transformers.joined import join
from rlkernel_transformers.support import find_model
from rlkernel_trl.errors import ExactnessLostError
from rlkernel_trl.forward import Ragged
from rlkernel_trl.vllm import Rounds


def decoder_of(model: Any) -> Decoder:
    """A `rlkernel.models.Decoder` of a model under `rlkernel_transformers.apply`; its parameters are the model's own.

    Where a layer has a LoRA adapter they are empty, for `fill`.
    """
    found = find_model(model)
    settings = found.model._rlkernel
    embedding = found.model.embed_tokens.weight
    with torch.device("meta"):
        decoder = Decoder(replace(from_hf(found.config.to_dict(), type(found).__name__), dtype=embedding.dtype))
    weights = dict(found.named_parameters(remove_duplicate=False))
    names: dict[str, list[str]] = {}
    for part in hf_layout(decoder.config):
        names.setdefault(part.parameter, []).append(part.name)
    for parameter, sources in names.items():
        owner, _, leaf = parameter.rpartition(".")
        module = decoder.get_submodule(owner)
        if all(name in weights for name in sources):
            tensor = join([weights[name].detach() for name in sources])
        else:
            tensor = torch.empty_like(module.get_parameter(leaf), device=embedding.device)
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    settings.to(embedding.device)
    decoder._buffers["cos_sin"] = settings.cos_sin
    for attention in decoder._attentions():
        attention.variant = settings.variant
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, model: Any) -> None:
    """Brings the decoder's parameters up to date where they are copies: LoRA merged, or weights that lie apart."""
    parameters = dict(decoder.named_parameters())
    places = {
        part.name: parameters[part.parameter].narrow(0, part.start, part.rows) for part in hf_layout(decoder.config)
    }
    for name, weight in merged_weights(model):
        if name in places and places[name].data_ptr() != weight.data_ptr():
            places[name].copy_(weight)


# Names in `generation_kwargs`, those of vLLM and of transformers' generate: what the engine takes, and what changes no
# token.
_LENGTH, _STOPS = ("max_tokens", "max_new_tokens"), ("stop", "stop_strings")
_TAKEN = frozenset({*_LENGTH, *_STOPS, "stop_token_ids", "ignore_eos"})
_WITHOUT_EFFECT = frozenset(
    {
        *("logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
        *("include_stop_str_in_output", "use_cache", "pad_token_id", "bos_token_id"),
    }
)
_STATE_BYTES = 12
"""Of a trained parameter: its fp32 master and AdamW's two moments, which the first step allocates."""


class Rollout:
    """rlkernel's engine on the policy's weights: what a trainer samples with, and what `rollout_func` returns.

    Attributes:
        llm: the engine, once the first generation has made it.
        kept: sets that the last turn sampled from, a completion each; None without filters.
    """

    def __init__(self, **engine: Any):
        self._settings = engine
        self._rounds = Rounds()
        self.llm: LLM | None = None
        self.kept: list[Ragged] | None = None

    def refuses(self, settings: Any) -> str:
        """What a configuration asks of the sampling that the engine does not have, as a sentence; empty: nothing."""
        given = settings.generation_kwargs or {}
        known = _TAKEN | _WITHOUT_EFFECT | ({"do_sample"} if given.get("do_sample") is True else set())
        others = ", ".join(sorted(set(given) - known))
        wrong = ["repetition_penalty"] if settings.repetition_penalty != 1.0 else []
        wrong += [f"generation_kwargs {others}"] if others else []
        if not wrong:
            return ""
        return (
            f"{' and '.join(wrong)}: rlkernel's engine takes temperature, top_p, top_k, min_p and seed from the "
            f"configuration and {', '.join(sorted(_TAKEN))} from generation_kwargs, nothing else; leave it out"
        )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions of the prompts, as TRL takes them: `prompt_ids`, `completion_ids`, `logprobs`, a list each."""
        if getattr(trainer, "_rl_kernel", None) is None:
            raise ExactnessLostError("rollout_func: set use_rl_kernel_backend=True in the configuration of the trainer")
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        completion_ids, logprobs = self.sample(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def sample(self, prompt_ids: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]]]:
        """A completion of each prompt with its log-probabilities; leaves the kept sets in the trainer's round."""
        from rlkernel import ops

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
        root = self._rounds.next(trainer)
        first = trainer.accelerator.process_index << 32
        params = [
            SamplingParams(
                temperature=args.temperature,
                top_k=filters.top_k,
                top_p=filters.top_p,
                min_p=filters.min_p,
                max_tokens=longest or llm.max_model_len,
                seed=mix_seed(root, first + i) % (1 << 64),
                stop=stop,
                stop_token_ids=(*ends, *(given.get("stop_token_ids") or ())),
                ignore_eos=True,  # TRL's own list of them is given
                return_kept=filters.active,
            )
            for i in range(len(prompt_ids))
        ]
        outputs = [output.outputs[0] for output in llm.generate(prompt_ids, params)]
        sets = [output.kept for output in outputs if output.kept is not None]
        device, vocabulary = llm.model.device, llm.model.config.vocab_size
        self.kept = [ops.kept_to_ids(kept.to(device), vocabulary) for kept in sets] if filters.active else None
        trainer._rl_kernel.round(trainer).keep(self.kept)
        return [list(output.token_ids) for output in outputs], [output.logprobs_tensor.tolist() for output in outputs]

    def _engine(
        self, trainer: Any, model: Any, prompts: list[list[int]], longest: int | None, *, with_texts: bool
    ) -> LLM:
        """The engine, made at the first generation, and again where a sequence would not fit into its cache."""
        settings = {"max_num_seqs": 256, "page_size": 16, **self._settings}
        decoder = decoder_of(model) if self.llm is None else self.llm.model
        context, page = settings.get("max_model_len") or decoder.config.max_position_embeddings, settings["page_size"]
        needed = ceil_div(min(max(map(len, prompts)) + (longest or context), context), page)
        if self.llm is not None and ("num_pages" in settings or needed <= self.llm.num_pages):
            return self.llm
        if "num_pages" not in settings:
            self.llm = None  # gives its cache back
            wanted = ceil_div(context, page) * settings["max_num_seqs"]
            affordable = _cache_bytes(trainer, decoder) // KVCache.page_bytes(decoder.config, page)
            settings["num_pages"] = max(needed, min(wanted, affordable))
        self.llm = LLM(decoder, trainer._tokenizer if with_texts else None, **settings)
        return self.llm


def _cache_bytes(trainer: Any, decoder: Decoder) -> int:
    """Bytes for the KV cache: on a GPU the share that TRL gives vLLM, at most half of what training will leave free."""
    if decoder.device.type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(decoder.device)
    free += torch.cuda.memory_reserved(decoder.device) - torch.cuda.memory_allocated(decoder.device)
    optimizer = trainer._master_adamw()
    if optimizer is None or not optimizer.state:
        free -= _STATE_BYTES * sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return int(max(0, min(total * trainer.args.vllm_gpu_memory_utilization, free / 2)))


def rollout_func(**engine: Any) -> Rollout:
    """rlkernel's engine with settings of its own, for `GRPOTrainer(rollout_func=...)`.

    Args:
        engine: settings of `rlkernel.engine.LLM`: `max_num_seqs`, `max_num_batched_tokens`, `num_pages`,
            `max_model_len`, `cuda_graphs` and others.
    """
    return Rollout(**engine)
