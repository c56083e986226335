"""rlkernel's own engine as TRL's `rollout_func`: it samples from the trainer's weights where they lie, without a copy.

The engine's parameters are views of the policy's, so there is no weight sync; its log-probabilities are compared like
vLLM's. GRPO only: TRL's RLOO takes no `rollout_func`.
"""

from __future__ import annotations

from typing import Any

import torch

from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import from_hf
from rlkernel.models.decoder import Decoder
from rlkernel_transformers.joined import join
from rlkernel_transformers.support import find_model
from rlkernel_trl.errors import ExactnessLostError
from rlkernel_trl.forward import Ragged
from rlkernel_trl.vllm import Rounds


def shared_decoder(model: Any) -> Decoder:
    """A `rlkernel.models.Decoder` whose parameters are those of a model under `rlkernel_transformers.apply`.

    Raises:
        ExactnessLostError: the weights do not lie as `apply` lays them, so they would have to be copied.
    """
    found = find_model(model)
    settings = found.model._rlkernel
    config = settings.config
    weights = dict(found.named_parameters(remove_duplicate=False))
    if any(".lora_" in name or ".base_layer." in name for name in weights):
        raise ExactnessLostError("rollout_func: the engine samples from plain weights; a LoRA adapter is none")
    with torch.device("meta"):
        decoder = Decoder(from_hf(found.config.to_dict(), type(found).__name__))
    parts: dict[str, list[Any]] = {}
    for part in hf_layout(config):
        parts.setdefault(part.parameter, []).append(weights[part.name])
    for name, tensors in parts.items():
        whole = join([t.detach() for t in tensors])
        if whole.data_ptr() != tensors[0].data_ptr():
            raise ExactnessLostError(f"rollout_func: the weights of {name} do not lie side by side")
        owner, _, leaf = name.rpartition(".")
        decoder.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(whole, requires_grad=False)
    settings.to(found.model.embed_tokens.weight.device)
    decoder._buffers["cos_sin"] = settings.cos_sin
    for attention in decoder._attentions():
        attention.variant = settings.variant
    return decoder


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

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions of the prompts: `prompt_ids`, `completion_ids`, `logprobs`, a list each."""
        from rlkernel import ops

        if getattr(trainer, "_rl_kernel", None) is None:
            raise ExactnessLostError("rollout_func: set use_rl_kernel_backend=True in the configuration of the trainer")
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.llm is None:
            self.llm = LLM(shared_decoder(model), None, **self._engine)
        self.llm.weights_updated()
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        args = trainer.args
        mode = int(not trainer.model.training)
        number = self._rounds.next(trainer.state.global_step, mode)
        root = mix_seed(args.seed, ((trainer.state.global_step * 2 + mode) << 20) + number)
        first = trainer.accelerator.process_index << 32
        filters = trainer._rl_kernel.filters
        params = [
            SamplingParams(
                temperature=args.temperature,
                top_k=filters.top_k,
                top_p=filters.top_p,
                min_p=filters.min_p,
                max_tokens=args.max_completion_length,
                seed=mix_seed(root, first + i) % (1 << 64),
                stop_token_ids=tuple(trainer.eos_token_ids),
                return_kept=filters.active,
            )
            for i in range(len(prompt_ids))
        ]
        outputs = [output.outputs[0] for output in self.llm.generate(prompt_ids, params)]
        self.kept = None
        if filters.active:
            vocabulary = self.llm.model.config.vocab_size
            device = self.llm.model.device
            self.kept = [ops.kept_to_ids(output.kept.to(device), vocabulary) for output in outputs]
        trainer._rl_kernel.kept = self.kept
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
