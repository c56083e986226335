"""A vision-language model: the decoder, with the encoder's features in place of media ids, mrope and deepstack."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlkernel import ops
from rlkernel.models.batch import PackedBatch, PagedBatch
from rlkernel.models.checkpoint import check_names, hf_tensors, open_tensors, read_into
from rlkernel.models.config import dtype_name, read_json
from rlkernel.models.decoder import Decoder, Inputs
from rlkernel.models.media import MediaTable
from rlkernel.models.mrope import mrope_table
from rlkernel.models.vision import Features, Grid, MediaError, encode
from rlkernel.models.vision_config import MultimodalConfig, VisionConfig, from_hf_multimodal


class VisionEncoder(nn.Module):
    """The encoder's parameters, by the names of `VisionConfig.layout` with `_` for `.`."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision = config
        for name, shape in config.layout().items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.empty(shape, dtype=dtype)))

    def parameter(self, name: str) -> Tensor:
        """A parameter by its name in the layout."""
        return self.get_parameter(name.replace(".", "_"))

    def forward(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> Features:
        place = self.parameter("patch_embed.proj.weight").device
        return encode(self.vision, self.parameter, torch.cat([p.to(place) for p in patches]), grids)


class VisionDecoder(Decoder):
    """Qwen2.5-VL or Qwen3-VL. Input ids from `vocab_size` on are features of `media`.

    Attributes:
        multimodal: the configuration; `config` is that of its text model.
        visual: the encoder.
        media: the media that input ids name.
    """

    axes: Tensor

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__(config.text)
        self.multimodal = config
        self.visual = VisionEncoder(config.vision, config.text.dtype)
        self.media = MediaTable(config.vision, config.text.vocab_size, self.visual)
        self.register_buffer("axes", torch.tensor(config.axes), persistent=False)

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype | None, device: torch.device | str, *, tp_leaves: int
    ) -> VisionDecoder:
        """Loads a Hugging Face directory of `Qwen2_5_VLForConditionalGeneration` or `Qwen3VLForConditionalGeneration`.

        Raises:
            ConfigError, CheckpointError: as `load_model`.
        """
        config = from_hf_multimodal(read_json(directory / "config.json"), str(directory / "config.json"))
        text = replace(config.text, dtype=dtype or config.text.dtype, tp_leaves=tp_leaves)
        with ExitStack() as stack:
            tensors = open_tensors(directory, stack)
            with torch.device(device):
                model = cls(replace(config, text=text))
            wanted = dict(hf_tensors(model))
            check_names(directory, text, tensors, set(wanted), model.hf_name("model.embed_tokens.weight"))
            with torch.no_grad():
                for name, target in wanted.items():
                    read_into(tensors[name], target)
        return model

    @classmethod
    def from_multimodal(
        cls, config: MultimodalConfig, seed: int, device: torch.device | str, std: float
    ) -> VisionDecoder:
        """A model with random weights, as `Decoder.from_config`."""
        with torch.device(device):
            model = cls(config)
        model.randomize_(seed, std)
        return model

    def hf_name(self, name: str) -> str:
        text, _ = self.multimodal.vision.family.stored
        return text + name.removeprefix("model.") if name.startswith("model.") else name

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.multimodal.vision.layout():
            yield self.multimodal.vision.family.stored[1] + name, self.visual.parameter(name).detach()

    def hf_config(self) -> dict[str, Any]:
        dtype = dtype_name(self.dtype)
        given = self.multimodal.hf
        architecture = self.multimodal.vision.family.architecture
        out = {**given, "architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
        return out | ({"text_config": {**given["text_config"], "dtype": dtype}} if "text_config" in given else {})

    @property
    def num_inputs(self) -> int:
        return self.media.limit

    def forget_features(self) -> None:
        self.media.forget()

    def check_ids(self, ids: npt.NDArray[Any], *, is_prompt: bool) -> None:
        """Raises MediaError if a prompt has placeholders or incomplete media, or a sequence to score has media."""
        vocab = self.config.vocab_size
        at = np.flatnonzero(ids >= vocab)
        if at.size and not is_prompt:
            raise MediaError(
                f"token {at[0]} is an id of a medium, which has no log-probability; score text alone, or call "
                "`model.logprob` on the rows of `model(PackedBatch(...))` that predict text"
            )
        self.media.axes(ids)
        if at.size and at[-1] == len(ids) - 1:
            (medium,) = self.media.of_rows(ids[-1:] - vocab)
            missing = medium.first + medium.count - 1 - (int(ids[-1]) - vocab)
            if missing:
                raise MediaError(
                    f"the prompt ends before the last {missing} of a medium's {medium.count} ids; put all of "
                    "`MediaTable.ids` into it, or drop the medium"
                )
        placeholders = (self.multimodal.image_token_id, self.multimodal.video_token_id)
        found = np.flatnonzero(np.isin(ids, placeholders))
        if is_prompt and found.size:  # elsewhere they may have been sampled
            raise MediaError(
                f"token {found[0]} is the placeholder {ids[found[0]]}, which stands for no medium; put "
                "`MediaTable.ids` of the medium in its place (docs/multimodal/media_cache.md)"
            )

    def axes_of(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return self.media.axes(ids)

    def inputs(self, batch: PackedBatch | PagedBatch) -> Inputs:
        ids = batch.input_ids
        axes = batch.axes
        if axes is None and isinstance(batch, PackedBatch):
            ends = batch.cu_seqlens.tolist()
            host = ids.cpu().numpy()
            parts = [self.media.axes(host[a:b]) for a, b in itertools.pairwise(ends)]
            axes = torch.from_numpy(np.concatenate(parts, axis=1)).to(ids.device)
        assert axes is not None
        table = mrope_table(self.cos_sin, axes, self.axes)
        turned = replace(batch, positions=torch.arange(ids.shape[0], device=ids.device))
        if isinstance(batch, PagedBatch) and not batch.has_media:
            return Inputs(ops.embedding(ids, self.embed_tokens.weight), turned, table)
        place = torch.nonzero(ids >= self.config.vocab_size)[:, 0]
        x = ops.embedding(ids.clamp(max=self.config.vocab_size - 1), self.embed_tokens.weight)
        if not place.numel():
            return Inputs(x, turned, table)
        rows = ids.index_select(0, place) - self.config.vocab_size
        media = self.media.of_rows(rows.cpu().numpy())
        features = self.media.features(media)
        firsts = torch.tensor([m.first for m in media], device=ids.device)
        starts = torch.tensor([0, *(m.count for m in media)], device=ids.device).cumsum(0)
        owner = torch.searchsorted(firsts, rows, right=True) - 1
        index = starts[owner] + rows - firsts[owner]
        # `embedding` gathers, because its gradient adds the uses of a feature in a fixed order
        x = x.index_copy(0, place, ops.embedding(index, features.merged))
        blank = torch.full_like(x, -0.0)  # which changes no bit
        added = tuple(blank.index_copy(0, place, ops.embedding(index, level)) for level in features.deepstack)
        return Inputs(x, turned, table, added)
