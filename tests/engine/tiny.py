"""Tiny random models of the engine's tests, and the training forward's log-probabilities of what was sampled."""

import functools

import torch

from rlkernel.engine import CompletionOutput, RequestOutput, SamplingParams
from rlkernel.models import Decoder, ModelConfig, PackedBatch

VOCAB = 40
CONTEXT = 96
EOS = 1
FAMILIES = {
    "fp32": {"model_type": "qwen3", "dtype": torch.float32},
    "bf16": {"model_type": "qwen3", "dtype": torch.bfloat16, "tie_word_embeddings": True},
    "window": {"model_type": "mistral", "dtype": torch.float32, "windows": (5, 5)},
}


def make_model(name: str = "fp32", seed: int = 0, **changes) -> Decoder:
    """A random decoder whose logits are spread enough for top-k, top-p and min-p to matter."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": (EOS,),
        **FAMILIES[name],
        **changes,
    }
    model = Decoder.from_config(ModelConfig(**values), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


@functools.cache
def shared_model(name: str) -> Decoder:
    """One model of each kind for all tests that do not change it."""
    return make_model(name)


def training_logps(model: Decoder, output: RequestOutput, params: SamplingParams) -> list[torch.Tensor]:
    """Log-probabilities of each completion's tokens through the packed training forward, with its kept sets."""
    out = []
    for completion in output.outputs:
        full = output.prompt_token_ids + completion.token_ids
        batch = PackedBatch.from_sequences([full])
        first = len(output.prompt_token_ids) - 1
        hidden = model(batch)[first:-1]
        targets = torch.tensor(completion.token_ids)
        temperature = params.temperature or 1.0
        out.append(model.logprob(hidden, targets, temperature=temperature, kept=completion.kept).logp.detach())
    return out


def fingerprint(completion: CompletionOutput) -> tuple:
    """Everything that must not depend on the batch, as bytes."""
    kept = None if completion.kept is None else completion.kept.numpy().tobytes()
    return (
        tuple(completion.token_ids),
        completion.logprobs_tensor.numpy().tobytes(),
        completion.finish_reason,
        completion.stop_reason,
        completion.text,
        kept,
    )
