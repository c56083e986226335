"""Decode steps of the V2 runner's sampler without a GPU: host work of each, and the tokens that it draws.

vLLM's kernels are counted and not run, so only our sampler's tokens are meaningful. `vllm_side.py` runs `steps`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SLOTS, VOCABULARY = 6, 50
_count = {"launches": 0, "ops": 0, "copies": 0, "logits": 0}


class Kernel:
    """A Triton kernel of vLLM, counted."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **meta: _count.update(launches=_count["launches"] + 1)


class Ops(TorchDispatchMode):
    """Counts torch ops that write memory, and those that write all logits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            _count["ops"] += 1
            _count["logits"] += isinstance(found, Tensor) and found.shape[-1:] == (VOCABULARY,)
        return found


class Buffer:
    """Memory written by the host and read by the GPU."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> Tensor:
        return self.cpu[:n]


def _without_gpu() -> None:
    from vllm.v1.worker.gpu import buffer_utils, input_batch
    from vllm.v1.worker.gpu.sample import bad_words, gumbel, logit_bias, logprob, penalties

    copy = buffer_utils.UvaBufferPool.copy_to_uva

    def counted(self: Any, x: Any) -> Any:
        _count["copies"] += 1
        return copy(self, x)

    if "uva" not in vars(buffer_utils.UvaBuffer):  # a tensor, in older vLLMs
        Buffer.uva = property(lambda self: self.cpu)  # type: ignore[assignment, method-assign]
    buffer_utils.UvaBuffer = Buffer
    buffer_utils.UvaBufferPool.copy_to_uva = counted
    if not hasattr(logprob.triton, "next_power_of_2"):  # vLLM's substitute without a GPU
        logprob.triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    for module in (bad_words, buffer_utils, gumbel, input_batch, logit_bias, logprob, penalties):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Kernel())


class Engine:
    """A sampler with its requests, one per slot."""

    def __init__(self, ours: bool, mode: str) -> None:
        from vllm.v1.worker.gpu import states
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        requests = states.RequestState(SLOTS, 64, 64, 0, VOCABULARY, torch.device("cpu"))
        config = SimpleNamespace(reasoning_config=None)
        given: dict[str, Any] = {
            "vllm_config": config, "max_num_reqs": SLOTS, "vocab_size": VOCABULARY, "device": torch.device("cpu"),
            "req_states": requests, "logprobs_mode": mode,
        }  # fmt: skip
        named = Sampler.__init__.__annotations__
        self.sampler: Any = Sampler(**{name: value for name, value in given.items() if name in named})
        self.settings: dict[int, Any] = {}
        if ours:
            from rlkernel_vllm import sampling_v2

            runner = SimpleNamespace(sampler=self.sampler, prompt_logprobs_worker=_prompt_worker())
            assert sampling_v2.replace_sampler(runner)

    def add(self, slot: int, bad: tuple[int, ...] = (), **asked: Any) -> None:
        from vllm import SamplingParams

        self.settings[slot] = SamplingParams(**{"temperature": 0.6, "seed": slot, **asked})
        if bad:
            self.settings[slot]._bad_words_token_ids = [list(bad)]  # of words, by a tokenizer
        between = (4,) if "prompt_len" in type(self.sampler).__mro__[-2].add_request.__annotations__ else ()
        self.sampler.add_request(slot, *between, self.settings[slot])

    def step(self, logits: Tensor, slots: list[int]) -> tuple[Any, dict[str, int]]:
        """The sampler's result for a step of these slots' requests, and its counts."""
        import numpy as np

        n = len(slots)
        rows = torch.tensor(slots, dtype=torch.int32)
        batch = SimpleNamespace(
            expanded_idx_mapping=rows, idx_mapping=rows, idx_mapping_np=np.array(slots, dtype=np.int32), num_reqs=n,
            cu_num_logits_np=np.arange(n + 1), cu_num_logits=torch.arange(n + 1), input_ids=torch.zeros(n).int(),
            expanded_local_pos=torch.zeros(n).int(), positions=torch.arange(10, 10 + n), seq_lens=torch.ones(n).int(),
            logits_indices=torch.arange(n), seq_lens_cpu_upper_bound=torch.ones(n).int(),
        )  # fmt: skip
        given = logits.clone()
        _count.update(dict.fromkeys(_count, 0))
        with torch.inference_mode(), Ops():
            self.sampler.apply_staged_writes()
            found = self.sampler(given, batch)
        return found, dict(_count)

    def right(self, logits: Tensor, slots: list[int]) -> bool:
        """Whether a step's tokens and log-probabilities are those of `ops` with the settings of these requests."""
        from rlkernel import ops

        found, _ = self.step(logits, slots)
        asked = [self.settings[slot] for slot in slots]
        column = lambda name, dtype: torch.tensor([getattr(a, name) for a in asked], dtype=dtype)
        top_k = column("top_k", torch.int32).clamp(min=0)
        wanted = ops.sample(
            logits, column("seed", torch.int64), torch.arange(10, 10 + len(slots)),
            temperature=column("temperature", torch.float32), top_k=top_k if top_k.any() else None,
        )  # fmt: skip
        processed = self.sampler.logprobs_mode == "processed_logprobs"
        logp = wanted.logp if processed else ops.logprob(logits, wanted.tokens).logp
        return torch.equal(found.sampled_token_ids[:, 0], wanted.tokens) and torch.equal(
            found.logprobs_tensors.logprobs[:, 0], logp
        )


def _prompt_worker() -> Any:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    return PromptLogprobsWorker.__new__(PromptLogprobsWorker)


class Users:
    """A user's logits processor that writes at every step."""

    written = applied = 0

    def add_request(self, slot: int, asked: Any) -> bool:
        return slot == 0

    def apply_staged_writes(self) -> None:
        self.written += 1

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        self.applied += 1
        return logits.index_fill_(1, torch.tensor([3]), 1e4)


def of_a_user(logits: list[Tensor]) -> dict[str, Any] | None:
    """Calls of such a processor in steps with and without the request that it changes, and the tokens; None if vLLM
    has no processors."""
    engine, processor = Engine(True, "raw_logprobs"), Users()
    if not hasattr(engine.sampler, "logits_processors"):
        return None
    engine.sampler.logits_processors.append(processor)
    for slot in range(3):
        engine.add(slot)
    given = zip(logits, ([0, 1], [0, 1], [1, 2], [1, 2]), strict=True)
    tokens = [engine.step(z, slots)[0].sampled_token_ids[:, 0].tolist() for z, slots in given]
    return {"written": processor.written, "applied": processor.applied, "tokens": tokens}


CHANGES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {7: 30.0}},
    "penalty": {"presence_penalty": 0.5},
    "bad_words": {"bad": (5,)},
}


def steps(folder: str) -> dict[str, Any]:
    """Counts of decode steps, stock and ours, and whether ours are right while requests come, go and move."""
    _without_gpu()
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, VOCABULARY, generator=generator) * 3
    out: dict[str, Any] = {"right": {}, "changes": {}}
    for asked, mode, settings in (
        ("no logprobs", "raw_logprobs", {}),
        ("logprobs", "raw_logprobs", {"logprobs": 0}),
        ("processed", "processed_logprobs", {"logprobs": 0, "temperature": 1.0}),  # as TRL asks
    ):
        for who in ("stock", "ours"):
            engine = Engine(who == "ours", mode)
            for slot in range(4):
                engine.add(slot, **settings)
            out[f"{who}, {asked}"] = [engine.step(draw(4), [2, 0, 1, 3])[1] for _ in range(3)]
    engine = Engine(True, "raw_logprobs")
    for slot in range(4):
        engine.add(slot)
    for name, changes in CHANGES.items():
        engine.add(0, **changes)
        out["changes"][name] = [engine.step(draw(4), [2, 0, 1, 3])[1] for _ in range(2)]
    out["user"] = of_a_user([draw(2) for _ in range(4)])
    for mode in ("raw_logprobs", "processed_logprobs"):
        engine, right = Engine(True, mode), []

        def check(*slots: int, engine: Engine = engine, right: list[bool] = right) -> None:
            right.append(engine.right(draw(len(slots)), list(slots)))

        for slot in range(4):
            engine.add(slot, temperature=0.4 + 0.3 * slot, logprobs=0)
        check(0, 1, 2, 3)
        check(0, 1, 2, 3)
        check(3, 1, 0, 2)  # moved
        check(3, 1, 0)  # one left
        engine.add(1, temperature=2.0, seed=77, logprobs=0)  # another request uses its slot
        check(3, 1, 0)
        engine.add(2, temperature=0.0, logprobs=0)
        check(3, 1, 0, 2)
        engine.add(4, top_k=2, logprobs=0)
        check(3, 1, 0, 2, 4)
        check(3, 1, 0, 2, 4)
        check(3, 1, 0, 2)
        engine.add(5, temperature=1.0, logprobs=0)
        check(5)
        out["right"][mode] = right
    return out
