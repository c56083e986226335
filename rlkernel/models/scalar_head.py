"""A decoder whose head gives one number per token: the value of a state, or at a completion's last token its reward.

On disk it is a Hugging Face `...ForSequenceClassification` model with one label, which transformers and TRL load.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.data.tokenizer import local_directory
from rlkernel.models.batch import PackedBatch
from rlkernel.models.checkpoint import load_as
from rlkernel.models.config import ModelConfig, read_json
from rlkernel.models.decoder import Backbone, Decoder, Weight

_LABELS: dict[str, Any] = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def is_scalar_model(path: str | Path) -> bool:
    """Whether the `config.json` of a model directory names a `...ForSequenceClassification` model."""
    names = read_json(local_directory(path) / "config.json").get("architectures") or []
    return any(str(name).endswith(ScalarModel.kind) for name in names)


class ScalarModel(Backbone):
    """The backbone of a decoder and a head [1, C] without bias.

    It has a decoder's parameters except `lm_head`, and `score.weight` after them. `models.save_model` writes it.
    """

    head, kind = "score.weight", "ForSequenceClassification"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.score = Weight(1, config.hidden_size, dtype=config.dtype)
        # Eight chains of the sum over C, or as many as divide it: one chain is less accurate than BLAS, which splits K.
        self.chunks = math.gcd(8, config.hidden_size)

    @classmethod
    @torch.no_grad()
    def from_decoder(cls, decoder: Decoder, seed: int = 0, pad_token_id: int | None = None) -> Self:
        """A model with a copy of the decoder's backbone and a random head.

        The head is drawn from a normal distribution of standard deviation 1 / sqrt(C + 1) (Stiennon et al. 2020,
        https://arxiv.org/abs/2009.01325, appendix B.1), so that first values have a size near 1.

        Args:
            decoder: not changed.
            seed: of the CPU generator that draws the head in fp32.
            pad_token_id: saved for transformers, which pads with it and reads the value of the last token that differs
                from it; default the decoder's, else its first end-of-sequence token.
        """
        config = decoder.config
        pads = (pad_token_id, config.pad_token_id, *config.eos_token_id)
        pad = next((token for token in pads if token is not None), None)
        extra = {**config.extra, **_LABELS}
        with torch.device(decoder.device):
            model = cls(replace(config, pad_token_id=pad, extra=extra))
        own = dict(model.named_parameters())
        for name, parameter in decoder.named_parameters():
            if name in own:
                own[name].copy_(parameter)
        generator = torch.Generator().manual_seed(seed)
        deviation = (config.hidden_size + 1) ** -0.5
        model.score.weight.copy_(torch.empty(1, config.hidden_size).normal_(0.0, deviation, generator=generator))
        model.gradient_checkpointing = decoder.gradient_checkpointing
        for mine, theirs in zip(model._attentions(), decoder._attentions(), strict=True):
            mine.variant = theirs.variant
        return model

    @classmethod
    def load(
        cls, path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", *,
        tp_leaves: int = 1,
    ) -> Self:  # fmt: skip
        """Loads a directory that `save_model`, transformers or TRL wrote; arguments and errors as in `load_model`."""
        return load_as(cls, path, dtype, device, tp_leaves=tp_leaves)

    def values(self, batch: PackedBatch) -> Tensor:  # [T] fp32
        """The head's value at every token, as accumulated in fp32, never rounded to the model's dtype."""
        return self.values_of(self(batch))

    def values_of(self, hidden: Tensor) -> Tensor:  # [T, C] -> [T] fp32
        """The head's values of hidden states."""
        return ops.linear(hidden, self.score.weight, chunks=self.chunks, out_dtype=torch.float32).squeeze(-1)

    def scores(self, batch: PackedBatch) -> Tensor:  # [B] fp32
        """The value at the last token of each sequence."""
        return self.values(batch)[batch.cu_seqlens[1:].long() - 1]
