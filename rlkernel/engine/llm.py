"""LLM, the engine's interface: checks requests, runs scheduler and runner, returns completions with log-probabilities.

The model is the trainer's own object and is read in place; after a training step only `weights_updated` is needed.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkernel import nvtx, ops
from rlkernel.data.tokenizer import Tokenizer, local_directory
from rlkernel.engine.block_manager import BlockManager
from rlkernel.engine.device_memory import CacheMemory
from rlkernel.engine.graphs import DecodeGraphs, Recorder, wanted
from rlkernel.engine.request import (
    CacheTooSmallError,
    Decode,
    EmptyPromptError,
    PromptTooLongError,
    Request,
    RequestError,
    RequestOutput,
    Sequence,
    TokenizerMissingError,
    TokenOutOfRangeError,
)
from rlkernel.engine.runner import Launched, Runner
from rlkernel.engine.sampling_params import SamplingParams, mix_seed
from rlkernel.engine.scheduler import Scheduler, SchedulerStats, Step
from rlkernel.engine.shared_prefix import PrefixGroups
from rlkernel.engine.table import SequenceTable, ceil_div
from rlkernel.models import KVCache, load_model
from rlkernel.ops import VariantError, attention_contract

if TYPE_CHECKING:
    from rlkernel.models import Decoder

CPU_CACHE_BYTES = 512 << 20
"""Largest KV cache on a CPU if `num_pages` is not given."""
GPU_CACHE_SHARE = 0.5
"""Largest share of the GPU's free memory for the KV cache if `num_pages` is not given."""


class LLM:
    """Continuous batching over one decoder: `generate` for rollouts, `score` for prompt log-probabilities.

    A completion depends, to the bit, only on weights, prompt, sampling parameters and seed. Batch, order of arrival,
    the sizes below, prefix hits and preemption change neither tokens nor log-probabilities.

    Args:
        model: a Decoder, used in place and never copied, or a Hugging Face directory to load.
        tokenizer: a `rlkernel.data.tokenizer.Tokenizer` or one of the `tokenizers` library; default that of the
            directory. Without one, prompts are token ids and `text` is empty.
        max_num_seqs: most sequences running at a time.
        max_num_batched_tokens: most tokens of one step; a longer prompt is prefilled in chunks.
        page_size: tokens per KV page.
        num_pages: pages of the KV cache; default enough for max_num_seqs sequences of max_model_len, limited to
            `CPU_CACHE_BYTES`, or to `GPU_CACHE_SHARE` of the GPU memory that attention's scratch memory leaves free.
        max_model_len: longest sequence, prompt and completion; default and limit: the model's max_position_embeddings.
        prefix_caching: reuse the KV of full pages for later prompts with the same prefix.
        shared_prefix: on a GPU, attention of a decode step reads the keys of a prompt once for all of its completions
            where that saves enough (`shared_prefix.LEAST_SAVED_BYTES`).
        seed: base of the seeds of requests without a seed.
        cuda_graphs: capture steps with one token per sequence as CUDA graphs; default on NVIDIA GPUs.
        attention: variant of attention, "split" or "fa3", set on the model, so that its training uses it too; default
            the model's current variant.

    Raises:
        ValueError: a size is out of range, or cuda_graphs=True for a model on the CPU.
        VariantError: the variant does not support this model and page size on this machine.
    """

    def __init__(
        self,
        model: Decoder | str | Path,
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        page_size: int = 16,
        num_pages: int | None = None,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        shared_prefix: bool = True,
        seed: int = 0,
        cuda_graphs: bool | None = None,
        attention: str | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            tokenizer = _tokenizer_of(model) if tokenizer is None else tokenizer
            model = load_model(model)
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        for name, value in (
            ("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens),
            ("page_size", page_size), ("num_pages", num_pages), ("max_model_len", max_model_len),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"LLM: {name}={value}; expected at least 1")
        context = config.max_position_embeddings
        if max_model_len is not None and max_model_len > context:
            raise ValueError(
                f"LLM: max_model_len={max_model_len}, but the model's max_position_embeddings is {context}"
            )
        self.max_model_len = max_model_len or context
        self.page_size = page_size
        self.seed = seed
        device = model.head_weight.device
        record = wanted(cuda_graphs, device)
        self.attention = model.attention_variant if attention is None else attention
        model.set_attention_variant(self.attention, page_size)
        longest = ceil_div(self.max_model_len, page_size)
        if num_pages is None:
            num_pages = _default_pages(model, page_size, longest, max_num_seqs, max_num_batched_tokens)
        self.num_pages = num_pages
        self.blocks = BlockManager(self.num_pages, prefix_caching)
        table = SequenceTable(max_num_seqs, page_size, tuple(config.eos_token_id), self.max_model_len, model.axes_of)
        self.scheduler = Scheduler(self.blocks, table, max_num_batched_tokens)
        self._memory = CacheMemory(device)
        cache = KVCache(config, self.num_pages, page_size, model.head_weight.dtype, device, self._memory.take)
        graphs = DecodeGraphs(model, lambda: Recorder(device)) if record else None
        prefixes = None
        if shared_prefix and device.type == "cuda" and self.attention == "split" and not any(config.windows):
            prefixes = PrefixGroups(table, KVCache.page_bytes(config, 1, cache.dtype) // config.num_layers)
        self.runner = Runner(model, cache, table, max_num_batched_tokens, longest, graphs, prefixes)
        # A GPU computes a step while the host reads the last one's tokens and plans the next.
        self._ahead = int(device.type == "cuda")
        self._launched: deque[tuple[Step, Launched]] = deque()
        self._decode = _decoder_of(tokenizer)
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    # Requests

    def generate(
        self,
        prompts: str | abc.Sequence[str | abc.Sequence[int]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; blocks until all are done.

        Args:
            prompts: texts or lists of token ids; one text alone is a list of one.
            sampling_params: for all prompts, or one per prompt; default `SamplingParams()`.
            on_finished: called with a prompt's position and its output as soon as all its completions are done.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt cannot be served (see its subclasses); then no prompt is started.
            ValueError: the numbers of sampling parameters and prompts differ.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            settings = [sampling_params or SamplingParams()] * len(texts)
        else:
            settings = list(sampling_params)
        if len(settings) != len(texts):
            raise ValueError(
                f"generate: {len(texts)} prompts and {len(settings)} sampling_params; give one, or one per prompt"
            )
        requests = [
            self._request(prompt, params, f"prompts[{i}]", number=i)
            for i, (prompt, params) in enumerate(zip(texts, settings, strict=True))
        ]
        return self._finish(requests, on_finished)

    def score(
        self, token_ids: abc.Sequence[abc.Sequence[int]], temperature: float | abc.Sequence[float] = 1.0
    ) -> list[Tensor]:  # [L_i - 1] fp32 each
        """Log-probability of every token but the first of each sequence, through the engine's paged forward.

        Args:
            token_ids: sequences of at least two ids.
            temperature: > 0, for all sequences or one per sequence.

        Returns:
            One fp32 tensor per sequence, on the CPU; element t is for token t + 1 given tokens 0..t.

        Raises:
            RequestError, ValueError: as `generate`.
        """
        sequences = list(token_ids)
        if isinstance(temperature, (int, float)):
            temperatures = [float(temperature)] * len(sequences)
        else:
            temperatures = [float(t) for t in temperature]
        if len(temperatures) != len(sequences):
            raise ValueError(
                f"score: {len(sequences)} sequences and {len(temperatures)} temperatures; give one, or one each"
            )
        requests = []
        for i, (ids, t) in enumerate(zip(sequences, temperatures, strict=True)):
            if not (t > 0 and np.isfinite(t)):
                raise ValueError(f"score: temperature[{i}]={t}; expected a finite number > 0")
            requests.append(self._request(ids, SamplingParams(), f"token_ids[{i}]", number=i, score_temperature=t))
        self._finish(requests)
        logps = [request.sequences[0].logps for request in requests]
        return [torch.from_numpy(logp[1:].copy()) for logp in logps if logp is not None]

    def add_request(self, prompt: str | abc.Sequence[int], sampling_params: SamplingParams | None = None) -> int:
        """Queues one prompt, at any time; returns its id. `step` computes it.

        Raises:
            RequestError: as `generate`.
        """
        request = self._request(prompt, sampling_params or SamplingParams(), "prompt", number=0)
        self._enqueue([request])
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Launches one batch; returns the requests that are known to be finished, in the order they were added.

        On a GPU the results are those of the batch before, which the GPU has computed in the meantime.
        """
        return [self._output(request) for request in self._step()]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    def abort_all(self) -> None:
        """Drops all requests and the prefix cache."""
        self._requests.clear()
        self._launched.clear()
        self.scheduler.clear()

    def weights_updated(self) -> None:
        """Drops all cached keys and values; call it after changing the model's weights.

        Raises:
            RuntimeError: requests are unfinished, and their KV belongs to the old weights.
        """
        if self.has_unfinished:
            raise RuntimeError(
                f"weights_updated: {len(self._requests)} requests are unfinished and hold KV of the old weights; "
                "step until they are done, or call abort_all"
            )
        self.blocks.clear_cache()
        self.model.forget_features()
        if self.runner.graphs is not None:
            self.runner.graphs.refresh()

    # Memory

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has no KV cache, after `sleep`."""
        return self.runner.cache.num_pages == 0

    @property
    def uncounted_bytes(self) -> int:
        """Bytes of the KV cache that torch's memory statistics lack: on NVIDIA GPUs all, while the engine is awake."""
        return self._memory.mapped_bytes

    def sleep(self, *, keep_graphs: bool = False) -> None:
        """Returns the memory of the KV cache and of the decode graphs to the GPU; `wake` takes it again.

        Args:
            keep_graphs: keep the graphs, with the activations of one decode step. On NVIDIA GPUs the cache comes back
                at the same address if its size is the same, so they stay valid; otherwise they are captured again.

        Raises:
            RuntimeError: requests are unfinished, and their KV would be lost.
        """
        if self.has_unfinished:
            raise RuntimeError(
                f"sleep: {len(self._requests)} requests are unfinished and would lose their KV; step until they are "
                "done, or call abort_all"
            )
        if self.is_asleep:
            return
        self.blocks.clear_cache()
        self.runner.cache.release()
        if self.runner.graphs is not None and not keep_graphs:
            self.runner.graphs.clear()
        self._memory.give_back(all_unused=not keep_graphs)

    def wake(self, num_pages: int | None = None) -> None:
        """Allocates the KV cache again after `sleep`; an engine that is awake with this size is left as it is.

        Args:
            num_pages: pages of the cache; default as before.

        Raises:
            RuntimeError: the engine is awake with another size.
            ValueError: num_pages is below 1.
            torch.OutOfMemoryError: the memory does not suffice; the engine still sleeps.
        """
        wanted = self.num_pages if num_pages is None else num_pages
        if wanted < 1:
            raise ValueError(f"wake: num_pages={num_pages}; expected at least 1")
        if not self.is_asleep:
            if wanted != self.num_pages:
                raise RuntimeError(
                    f"wake: the engine is awake with num_pages={self.num_pages}; call sleep() before "
                    f"wake(num_pages={num_pages})"
                )
            return
        try:
            self.runner.cache.allocate(wanted)
        except torch.OutOfMemoryError as error:
            size = wanted * KVCache.page_bytes(self.model.config, self.page_size, self.runner.cache.dtype)
            raise torch.OutOfMemoryError(
                f"wake: out of memory, num_pages={wanted} takes {size / 2**30:.1f} GiB; free memory, or pass a smaller "
                f"num_pages ({error})"
            ) from error
        if wanted != self.num_pages:
            self.num_pages, stats = wanted, self.blocks.stats
            self.blocks = self.scheduler.blocks = BlockManager(wanted, self.blocks.prefix_caching)
            self.blocks.stats = stats

    @property
    def contract(self) -> str:
        """Contract id of the completions; a training forward with the same id has the same log-probabilities."""
        return attention_contract(self.attention)

    @property
    def stats(self) -> SchedulerStats:
        """Counts of steps, tokens, shared prompt tokens and preemptions since the engine was created."""
        return self.scheduler.stats

    # Checking

    def _request(
        self,
        prompt: str | abc.Sequence[int],
        params: SamplingParams,
        where: str,
        number: int,
        score_temperature: float | None = None,
    ) -> Request:
        """Checks and returns a request without queueing it. `number`: requests that will be queued before it."""
        if self.is_asleep:
            raise RuntimeError("LLM: the engine sleeps and has no KV cache; call wake() first")
        ids = self._token_ids(prompt, where)
        scoring = score_temperature is not None
        self._check_ids(ids, where, params, scoring)
        if params.stop_strings and self._decode is None:
            raise TokenizerMissingError(
                f"{where}: SamplingParams.stop={params.stop_strings!r} needs text, and the engine has no tokenizer; "
                "give LLM one, or use stop_token_ids"
            )
        request_id = self._next_id + number
        seed = params.seed if params.seed is not None else mix_seed(self.seed, request_id)
        return Request(request_id, prompt if isinstance(prompt, str) else None, ids, params, seed, score_temperature)

    def _token_ids(self, prompt: str | abc.Sequence[int], where: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TokenizerMissingError(
                    f"{where} is text, and the engine has no tokenizer; give LLM one, or token ids"
                )
            return _encode(self.tokenizer, prompt)
        try:
            values = np.asarray(prompt if isinstance(prompt, np.ndarray) else list(prompt))
        except TypeError:
            raise RequestError(f"{where} is {type(prompt).__name__}; expected text or a list of token ids") from None
        if values.size and (values.ndim != 1 or values.dtype.kind not in "iu"):
            raise RequestError(
                f"{where} holds {values.dtype} of shape {values.shape}; expected text or a list of token ids"
            )
        return values.tolist()

    def _check_ids(self, ids: list[int], where: str, params: SamplingParams, scoring: bool) -> None:
        vocab = self.model.num_inputs
        if not ids:
            raise EmptyPromptError(f"{where} is empty; a prompt needs at least one token (a start token, for example)")
        if scoring and len(ids) < 2:
            raise EmptyPromptError(
                f"{where} has one token; scoring needs at least two, because the first is not scored"
            )
        for at, extreme in ((ids.index(v), v) for v in (min(ids), max(ids)) if not 0 <= v < vocab):
            raise TokenOutOfRangeError(
                f"{where}[{at}] is token id {extreme}; the model's vocabulary has ids 0 to {vocab - 1}; use the "
                "model's own tokenizer"
            )
        try:
            self.model.check_ids(np.asarray(ids), is_prompt=not scoring)
        except ValueError as error:  # MediaError
            raise RequestError(f"{where}: {error}") from None
        limit = self.max_model_len + int(scoring)
        if len(ids) >= limit:
            can_rise = self.max_model_len < self.model.config.max_position_embeddings
            remedy = "shorten it, or raise max_model_len" if can_rise else "shorten it"
            raise PromptTooLongError(
                f"{where} has {len(ids)} tokens; a context of max_model_len={self.max_model_len} takes at most "
                f"{limit - 1}{'' if scoring else ' and one new token'}: {remedy}"
            )
        total = len(ids) if scoring else min(len(ids) + params.max_tokens, self.max_model_len)
        need = ceil_div(total - 1, self.page_size)  # the last token's KV is never computed
        if need > self.num_pages:
            raise CacheTooSmallError(
                f"{where}: {len(ids)} prompt tokens and max_tokens={params.max_tokens} may take {need} pages of "
                f"{self.page_size}; the cache has num_pages={self.num_pages}: raise num_pages or lower max_tokens"
            )

    # Driving

    def _enqueue(self, requests: list[Request]) -> None:
        for request in requests:
            self._next_id = request.request_id + 1
            self._requests[request.request_id] = request
            for sequence in request.spawn(self._decode, self.blocks.prefix_caching):
                self.scheduler.add(sequence)

    def _finish(
        self, requests: list[Request], on_finished: Callable[[int, RequestOutput], None] | None = None
    ) -> list[RequestOutput]:
        if self.has_unfinished:
            raise RuntimeError(
                f"generate: {len(self._requests)} requests of add_request are unfinished; step until they are done, or "
                "call abort_all"
            )
        self._enqueue(requests)
        outputs: dict[int, RequestOutput] = {}
        positions = {request.request_id: i for i, request in enumerate(requests)}
        try:
            while self.has_unfinished:
                for output in self.step():
                    position = positions[output.request_id]
                    outputs[position] = output
                    if on_finished is not None:
                        on_finished(position, output)
        except BaseException:  # of the callback, or Ctrl-C between two steps
            self.abort_all()
            raise
        return [outputs[position] for position in range(len(requests))]

    def _step(self) -> list[Request]:
        try:
            if self.model.attention_variant != self.attention:
                raise VariantError(
                    f"LLM: the engine was created for attention variant {self.attention!r}, but the model was set to "
                    f"{self.model.attention_variant!r} later; create a new LLM, or call "
                    f"model.set_attention_variant({self.attention!r})"
                )
            with nvtx.range("engine.schedule"):
                step = self.scheduler.schedule()
            if step is not None:
                with nvtx.range("engine.run"):
                    self._launched.append((step, self.runner.launch(step)))
            if not self._launched or (step is not None and len(self._launched) <= self._ahead):
                return []
            with nvtx.range("engine.commit"):
                oldest, launched = self._launched.popleft()
                result = launched.result()
                ended = self.scheduler.commit(oldest, result.tokens, result.logps, result.kept)
        except BaseException:
            # Pages may be registered but not written, and rows half updated, so nothing may be reused.
            self.abort_all()
            raise
        finished = [request for request in map(self._ended, ended) if request is not None]
        return sorted(finished, key=lambda request: request.request_id)

    def _ended(self, sequence: Sequence) -> Request | None:
        request = sequence.request
        request.unfinished -= 1
        return self._requests.pop(request.request_id) if request.unfinished == 0 else None

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [sequence.output(self._decode) for sequence in request.sequences],
            sum(sequence.cached_tokens for sequence in request.sequences),
        )


def _tokenizer_of(path: str | Path) -> Tokenizer | None:
    return Tokenizer(path) if (local_directory(path) / "tokenizer.json").is_file() else None


def _decoder_of(tokenizer: Any) -> Decode | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))  # the tokenizers library wraps the ids


def _default_pages(model: Decoder, page_size: int, longest: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Pages for `max_num_seqs` sequences of `longest` pages within the memory budget, but at least for one."""
    config, weight, budget = model.config, model.head_weight, CPU_CACHE_BYTES
    if weight.device.type == "cuda":
        q, k = (weight.new_empty(0, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
        scratch = ops.attention_scratch_bytes(
            q, k, tokens=max_num_batched_tokens, sequences=max_num_seqs, longest=longest * page_size
        )
        budget = int(max(0, torch.cuda.mem_get_info(weight.device)[0] - scratch) * GPU_CACHE_SHARE)
    affordable = budget // KVCache.page_bytes(config, page_size, weight.dtype)
    return max(longest, min(longest * max_num_seqs, affordable))
