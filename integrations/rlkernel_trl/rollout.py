"""rlkernel's own engine as TRL's `rollout_func`: it samples from the trainer's weights where they lie, without a copy.

The engine's parameters are views of the policy's, so there is no weight sync (but for layers with LoRA, whose merged
weights are computed); its log-probabilities are compared like vLLM's. GRPO only: TRL's RLOO takes no `rollout_func`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.sampling_params import mix_seed
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


# Names in `generation_kwargs`: what the engine takes, and what changes no token.
_TAKEN = frozenset({"max_tokens", "stop", "stop_token_ids", "ignore_eos"})
_WITHOUT_EFFECT = frozenset(
    {
        *("logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
        *("include_stop_str_in_output",),
    }
)


class Rollout:
    """What `rollout_func` returns; TRL calls it with prompts and the trainer.

    Attributes:
        llm: the engine, once the first generation has made it.
        kept: sets that the last generation sampled from, a completion each; None without filters.
    """

    def __init__(self, **engine: Any):
        self._engine = engine
        self._rounds = Rounds()
        self.llm: LLM | None = None
        self.kept: list[Ragged] | None = None

    def check(self, settings: Any) -> None:
        """Whether the engine has what a configuration asks of the sampling.

        Raises:
            ExactnessLostError: it has not, strict or not: the run would sample from another distribution than asked.
        """
        given = settings.generation_kwargs or {}
        wrong = [f"generation_kwargs {name}" for name in sorted(set(given) - _TAKEN - _WITHOUT_EFFECT)]
        if settings.repetition_penalty != 1.0:
            wrong.append("repetition_penalty")
        if wrong:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: {', '.join(wrong)}: rlkernel's engine takes temperature, top_p, top_k, min_p "
                f"and seed from the configuration and {', '.join(sorted(_TAKEN))} from generation_kwargs, nothing "
                "else; leave it out, or sample with vLLM (use_vllm=True without rollout_func)"
            )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions of the prompts: `prompt_ids`, `completion_ids`, `logprobs`, a list each."""
        from rlkernel import ops

        if getattr(trainer, "_rl_kernel", None) is None:
            raise ExactnessLostError("rollout_func: set use_rl_kernel_backend=True in the configuration of the trainer")
        args = trainer.args
        given = args.generation_kwargs or {}
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.llm is None:
            tokenizer = trainer._tokenizer if given.get("stop") else None  # with one the engine writes texts
            self.llm = LLM(decoder_of(model), tokenizer, **self._engine)
        fill(self.llm.model, model)
        self.llm.weights_updated()
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        ignore_eos = bool(given.get("ignore_eos", False))
        ends = () if ignore_eos else trainer.eos_token_ids
        root = self._rounds.next(trainer)
        first = trainer.accelerator.process_index << 32
        filters = trainer._rl_kernel.filters
        params = [
            SamplingParams(
                temperature=args.temperature,
                top_k=filters.top_k,
                top_p=filters.top_p,
                min_p=filters.min_p,
                max_tokens=given.get("max_tokens") or args.max_completion_length,
                seed=mix_seed(root, first + i) % (1 << 64),
                stop=given.get("stop") or (),
                stop_token_ids=(*ends, *(given.get("stop_token_ids") or ())),
                ignore_eos=ignore_eos,
                return_kept=filters.active,
            )
            for i in range(len(prompt_ids))
        ]
        outputs = [output.outputs[0] for output in self.llm.generate(prompt_ids, params)]
        self.kept = None
        if filters.active:
            vocabulary = self.llm.model.config.vocab_size
            device = self.llm.model.device
            sets = [output.kept for output in outputs]
            self.kept = [ops.kept_to_ids(kept.to(device), vocabulary) for kept in sets if kept is not None]
        trainer._rl_kernel.round(trainer).kept = self.kept
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(output.token_ids) for output in outputs],
            "logprobs": [output.logprobs_tensor.tolist() for output in outputs],
        }


def rollout_func(**engine: Any) -> Rollout:
    """rlkernel's engine for `GRPOTrainer(rollout_func=...)`, on the trainer's own weights.

    Args:
        engine: settings of `rlkernel.engine.LLM`: `max_num_seqs`, `max_num_batched_tokens`, `num_pages`,
            `max_model_len`, `cuda_graphs` and others.
    """
    return Rollout(**engine)
