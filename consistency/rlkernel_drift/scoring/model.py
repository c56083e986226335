"""A reference model: the transformers forward with a chosen dtype, layout, configuration and weights.

The head is applied here, only to the hidden states of the counted rows, so that its precision can be chosen.
`Decoding` decodes with a cache as rollouts do: left-padded prompts, then one token per sequence and step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.attention import AttentionState
from rlkernel_drift.scoring.sequences import Sequences

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BATCH_TOKENS = 16384  # of a padded batch
_LOGITS = 1 << 26  # elements


def name_of(dtype: torch.dtype) -> str:
    """The key of a dtype in `DTYPES`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Head:
    """Precision of the head.

    Attributes:
        inputs: dtype to which hidden states and weight are rounded; None leaves them unchanged.
        logits: dtype to which logits are rounded; None keeps fp32.
    """

    inputs: torch.dtype | None = None
    logits: torch.dtype | None = None


@dataclass(frozen=True)
class Layout:
    """How sequences are laid out in a batch.

    Attributes:
        pad: side of the padding; "none" computes each sequence alone.
        multiple: padded lengths are multiples of it.
        token: the padding token.
    """

    pad: Literal["none", "left", "right"] = "right"
    multiple: int = 1
    token: int = 0


class ReferenceModel:
    """A causal language model of transformers, and variations of it.

    Args:
        model: in fp32 or in the checkpoint's dtype; copies in other dtypes are made when needed.
        path: directory of the model, for its tokenizer.
        own: dtype of the checkpoint; default that of `model`.
    """

    def __init__(self, model: Any, path: Path | None = None, own: torch.dtype | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.path = path
        self.config = model.config
        self.own = own or next(model.parameters()).dtype
        self._copies: dict[torch.dtype, Any] = {next(model.parameters()).dtype: self.model}
        self._named: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
        self._variants: dict[str, Any] = {}

    @classmethod
    def load(
        cls, path: str | Path, device: str = "cpu", attention: str = "", dtype: torch.dtype = torch.float32
    ) -> ReferenceModel:
        """Loads a model directory.

        Args:
            attention: attention implementation; "" is the default of transformers, or eager for models whose score
                caps that default ignores.
            dtype: of the weights; fp32 lets hypotheses round them to other dtypes.

        Raises:
            DriftError: transformers is missing, or the directory cannot be loaded. Code in the directory is never run,
                and a name that is not a directory is not looked up on the Hugging Face Hub.
        """
        if not (Path(path) / "config.json").is_file():
            raise DriftError(f"{path} is not a model directory: it has no config.json")
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise DriftError("scoring needs transformers: pip install 'rlkernel[drift]'") from None
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        trusted: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        try:
            config = AutoConfig.from_pretrained(str(path), **trusted)
            chosen = attention or ("eager" if _capped(config) else None)
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation=chosen, **trusted)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DriftError(f"{path} cannot be loaded by transformers: {first}") from None
        return cls(model.to(device), Path(path), config.dtype)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Attention implementations that compute this model; sdpa supports neither score caps nor sinks."""
        return ("eager",) if _capped(self.config) or not self.model._supports_sdpa else ("sdpa", "eager")

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def head_width(self) -> int:
        """Elements of an attention head."""
        config = self.config.get_text_config()
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    def in_dtype(self, dtype: torch.dtype) -> Any:
        """The model in a dtype; copies are cached."""
        if dtype not in self._copies:
            made = self._copies[dtype] = copy.deepcopy(self.model).to(dtype)
            # `.to(dtype)` rounds the rotary frequencies; from_pretrained and engines keep them in fp32.
            pairs = zip(rotary_frequencies(self.model), rotary_frequencies(made), strict=True)
            for (_, name, frequencies), (target, _, _) in pairs:
                setattr(target, name, frequencies.clone())
            if dtype == torch.float64 and hasattr(made, "set_experts_implementation"):
                made.set_experts_implementation("eager")  # the default, torch's grouped products, has no fp64
        return self._copies[dtype]

    # ---- forward ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hidden(
        self,
        sequences: Sequences,
        dtype: torch.dtype = torch.float32,
        layout: Layout | None = None,
        model: Any = None,
    ) -> Tensor:  # [N, C]
        """Hidden states after the final norm of all counted rows; `model` is a variant, default the copy in `dtype`."""
        model = self.in_dtype(dtype) if model is None else model
        layout = layout or Layout()
        highest = max((int(ids.max()) for ids in sequences.ids if len(ids)), default=0)
        if highest >= self.vocab_size:
            raise DriftError(
                f"token id {highest} is outside the vocabulary of {self.vocab_size} entries of "
                f"{self.path or 'the model'}; name the model from which the tokens were sampled"
            )
        parts: list[Tensor] = []
        for batch in _batches(sequences, 1 if layout.pad == "none" else _BATCH_TOKENS):
            AttentionState.batch = batch
            parts += self._batch(model, sequences, batch, layout)
        return torch.cat(parts)

    def _batch(self, model: Any, sequences: Sequences, batch: range, layout: Layout) -> list[Tensor]:
        longest = max(len(sequences.ids[i]) for i in batch)
        width = -(-longest // layout.multiple) * layout.multiple
        ids = torch.full((len(batch), width), layout.token)
        positions = torch.zeros((len(batch), width), dtype=sequences.positions[batch[0]].dtype)
        mask = torch.zeros((len(batch), width), dtype=torch.int64)
        starts = []
        for row, i in enumerate(batch):
            size = len(sequences.ids[i])
            start = width - size if layout.pad == "left" else 0
            ids[row, start : start + size] = sequences.ids[i]
            positions[row, start : start + size] = sequences.positions[i]
            mask[row, start : start + size] = 1
            starts.append(start)
        # A mask is passed even when it hides nothing: without one, transformers takes positions that restart for the
        # beginning of another packed sequence.
        out = model.base_model(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask.to(self.device),
            use_cache=False,
        ).last_hidden_state
        return [out[row, (sequences.rows[i] + starts[row]).to(self.device)] for row, i in enumerate(batch)]

    @torch.no_grad()
    def head(
        self,
        hidden: Tensor,
        head: Head | None = None,
        weight: Tensor | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Tensor:  # [N, V] fp32
        """Logits of hidden states, computed in fp32 from the values as they are unless `head` rounds them.

        Args:
            config: replaced entries of the configuration, of which the scale and the cap of the logits count here.
        """
        head, config = head or Head(), config or {}
        setting = lambda name: config.get(name, getattr(self.config, name, None))
        module = self.in_dtype(hidden.dtype).get_output_embeddings()
        w = module.weight if weight is None else weight.to(hidden.dtype)
        x = hidden
        if head.inputs is not None:
            x, w = x.to(head.inputs), w.to(head.inputs)
        logits = torch.nn.functional.linear(x.float(), w.float(), None if module.bias is None else module.bias.float())
        if head.logits is not None:  # a model in 16 bits scales and caps its logits in 16 bits
            logits = logits.to(head.logits)
        if scale := setting("logits_scaling"):
            logits = logits / scale
        if cap := setting("final_logit_softcapping"):
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def rows_that_fit(self) -> int:
        """Counted tokens whose fp32 logits take 256 MiB."""
        return max(64, _LOGITS // self.vocab_size)

    # ---- variations ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def edited(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
        """Replaces parameters of the copy of a dtype inside the context."""
        parameters = self._parameters(dtype)
        kept = {name: parameters[name].data for name in tensors}
        try:
            for name, value in tensors.items():
                parameters[name].data = value.to(device=self.device, dtype=dtype)
            yield
        finally:
            for name, value in kept.items():
                parameters[name].data = value

    @contextlib.contextmanager
    def configured(self, entries: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Any]:
        """The copy of a dtype, or a variant of it with other entries of the configuration and the same parameters.

        Raises:
            ValueError, TypeError, AttributeError, KeyError, RuntimeError: transformers refuses the configuration.
        """
        model = self.in_dtype(dtype)
        if not entries:
            yield model
            return
        key = f"{dtype} {sorted(entries.items(), key=lambda entry: entry[0])}"
        if key not in self._variants:
            while len(self._variants) >= _VARIANTS:
                self._variants.pop(next(iter(self._variants)))
            self._variants[key] = _variant(model, entries)
        yield self._variants[key]

    @functools.cached_property
    def head_names(self) -> tuple[str, ...]:
        """Parameters that are the head's weight: a tied head is the embedding."""
        return tuple(n for n, p in self.model.named_parameters() if p is self.model.get_output_embeddings().weight)

    @property
    def theta(self) -> float | None:
        """Base of the rotary embedding; None where its frequencies are scaled."""
        own = [(m, f) for m, name, f in rotary_frequencies(self.model) if not name.endswith("original_inv_freq")]
        if len(own) != 1 or getattr(own[0][0], "rope_type", "default") != "default":
            return None
        frequencies = own[0][1]
        size = len(frequencies)
        return float(frequencies[-1].double() ** (-size / (size - 1))) if size > 1 else None

    def parameter(self, name: str) -> Tensor:
        """A parameter of the model as loaded."""
        return self._parameters(next(self.model.parameters()).dtype)[name].data

    def _parameters(self, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
        """Parameters of the copy of a dtype by name, cached because fits of weights look them up at each step."""
        if dtype not in self._named:
            self._named[dtype] = dict(self.in_dtype(dtype).named_parameters())
        return self._named[dtype]


def _capped(config: Any) -> bool:
    """Whether attention scores are capped; transformers' sdpa silently ignores the cap."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def rotary_frequencies(model: Any) -> list[tuple[Any, str, Tensor]]:
    """Rotary frequencies [D / 2] as (module, attribute, value); some families have one set per type of layer."""
    buffers = ((m, name, value) for m in model.modules() for name, value in m.named_buffers(recurse=False))
    return [(module, name, value) for module, name, value in buffers if name.endswith("inv_freq")]


_VARIANTS = 4  # models with another configuration that are kept


def _variant(model: Any, entries: Mapping[str, Any]) -> Any:
    """A model with another configuration that shares the parameters of `model`."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(model.config)
    for name, value in entries.items():
        if isinstance(value, dict):
            value = {**(getattr(config, name) or {}), **value}
        try:
            setattr(config, name, value)
        except StrictDataclassFieldValidationError as error:
            raise ValueError(str(error)) from None
    with no_init_weights():
        made = type(model)(config)
    made.set_attn_implementation(model.config._attn_implementation)
    known = dict(model.named_parameters())
    for name, parameter in list(made.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        same = known.get(name)
        if same is None or same.shape != parameter.shape:
            same = torch.nn.Parameter(torch.zeros_like(parameter, dtype=next(iter(known.values())).dtype), False)
        setattr(made.get_submodule(owner), leaf, same)
    return made.to(next(iter(known.values())).device).eval()


@contextlib.contextmanager
def replaced(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes, given as (object, name, value), inside the context."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _batches(sequences: Sequences, budget: int) -> Iterator[range]:
    start, longest = 0, 0
    for i, ids in enumerate(sequences.ids):
        longest = max(longest, len(ids))
        if i > start and (budget == 1 or (i - start + 1) * longest > budget):
            yield range(start, i)
            start, longest = i, len(ids)
    yield range(start, len(sequences.ids))


class Decoding:
    """A batch that is decoded token by token with a cache.

    Args:
        model: of transformers. prompts: token ids. positions: of each sequence; default 0, 1, 2, ...

    Attributes:
        hidden: [B, C] of the last token of each sequence.
    """

    def __init__(self, model: Any, prompts: list[list[int]], positions: list[Tensor] | None = None) -> None:
        self.model, width = model, max(map(len, prompts))
        self.device = next(model.parameters()).device
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        place = torch.zeros_like(ids) if positions is None else torch.zeros(ids.shape, dtype=positions[0].dtype)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
            known = torch.arange(len(prompt)) if positions is None else positions[row][: len(prompt)]
            place[row, width - len(prompt) :] = known
        self.mask = mask.to(self.device)
        self.next = torch.tensor([len(prompt) for prompt in prompts])
        self.cache: Any = None
        self._run(ids, place)

    def _run(self, ids: Tensor, positions: Tensor) -> None:
        with torch.no_grad():
            out = self.model.base_model(
                input_ids=ids.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=self.mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache, self.hidden = out.past_key_values, out.last_hidden_state[:, -1]

    def feed(self, tokens: Tensor, positions: Tensor | None = None) -> None:
        """Appends one token to each sequence, [B]."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self._run(tokens[:, None], (self.next if positions is None else positions)[:, None])
        self.next = self.next + 1


def decoded_hidden(model: Any, sequences: Sequences) -> Tensor:  # [N, C]
    """Hidden states of the counted rows, each computed when its token was fed to the cache."""
    prompts = [ids[: int(rows[0]) + 1].tolist() for ids, rows in zip(sequences.ids, sequences.rows, strict=True)]
    state = Decoding(model, prompts, sequences.positions)
    steps = [state.hidden]
    longest = max(int(rows[-1]) - int(rows[0]) for rows in sequences.rows)
    for step in range(longest):
        at = [min(len(p) + step, len(ids) - 1) for p, ids in zip(prompts, sequences.ids, strict=True)]
        tokens = torch.stack([ids[i] for ids, i in zip(sequences.ids, at, strict=True)])
        places = torch.stack([p[i] for p, i in zip(sequences.positions, at, strict=True)])
        state.feed(tokens, places)
        steps.append(state.hidden)
    table = torch.stack(steps)
    return torch.cat([table[(rows - int(rows[0])).to(table.device), i] for i, rows in enumerate(sequences.rows)])


@torch.no_grad()
def prefixed_hidden(old: Any, new: Any, sequences: Sequences, counts: Sequence[int]) -> Tensor:  # [N, C]
    """Hidden states of the counted rows where the first tokens of each sequence, `counts` of them, went through `old`.

    The later tokens go through `new` and read the keys and values of `old`.
    """
    device = next(new.parameters()).device
    parts = []
    each = zip(sequences.ids, sequences.positions, sequences.rows, counts, strict=True)
    for ids, positions, rows, count in each:
        ids, positions, count = ids[None].to(device), positions[None].to(device), min(max(count, 0), len(ids))
        found, cache = [], None
        for model, part in ((old, slice(0, count)), (new, slice(count, None))):
            if ids[:, part].shape[1]:
                out = model.base_model(
                    input_ids=ids[:, part], position_ids=positions[:, part], past_key_values=cache, use_cache=True
                )
                found.append(out.last_hidden_state[0])
                cache = out.past_key_values
        parts.append(torch.cat(found)[rows.to(device)])
    return torch.cat(parts)
