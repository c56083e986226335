"""Capture from vLLM: samples with one seed per request, then scores the tokens as prompts, without a prefix cache.

Operators are recorded while it samples (`vllm_worker`): fingerprints in any mode, values in eager mode.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlkernel_drift.capsule import (
    Capsule,
    Manifest,
    Operators,
    Tensor,
    WeightFingerprint,
    build_capsule,
)
from rlkernel_drift.capsule.tensor_file import DEFAULT_LIMITS, parse_tensors, read_bytes
from rlkernel_drift.capture.request import (
    Request,
    captured,
    counted_sequences,
    prompt_ids,
    stream_of,
    tokens_only,
)
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints, read_weights

_WORKER = "rlkernel_drift.capture.vllm_worker.Recording"
_SETTINGS = ("VLLM_BATCH_INVARIANT", "VLLM_ATTENTION_BACKEND")
_CHUNK = 16  # tokens per step of the chunked engine of a floor
_STEP, _SEQUENCES = 1024, 128  # tokens and sequences per step where values are kept until its end

# ---- the log of an engine that fails -------------------------------------------------------------------------------

_LINES = 2000
_CAUSE = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)): (.+)")
# the processes around the failed one only repeat that it failed
_ECHO = re.compile(r"initialization failed|failed to start|See (?:stack trace|root cause)", re.IGNORECASE)


@contextlib.contextmanager
def teed_output() -> Iterator[deque[str]]:
    """Yields the last lines of standard output and standard error, which still go where they went before.

    File descriptors are redirected, because vLLM's processes write the reason why they fail to their log only.
    Processes that the block starts keep writing through the pipes afterwards.
    """
    log: deque[str] = deque(maxlen=_LINES)
    threads = []
    kept = {}
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        kept[number] = os.dup(number)
        read, write = os.pipe()
        os.dup2(write, number)
        os.close(write)
        threads.append(threading.Thread(target=_tee, args=(read, os.dup(kept[number]), log), daemon=True))
        threads[-1].start()
    try:
        yield log
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(kept[number], number)
            os.close(kept[number])
        # not joined without a limit, because a process that still runs keeps its end of the pipe open
        for thread in threads:
            thread.join(0.5)


def _tee(read: int, target: int, log: deque[str]) -> None:
    rest = b""
    while part := os.read(read, 1 << 16):
        # a closed terminal must not block the processes that write
        with contextlib.suppress(OSError):
            os.write(target, part)
        *lines, rest = (rest + part).split(b"\n")
        log.extend(line.decode("utf-8", "replace") for line in lines)
        rest = rest[-(1 << 16) :]
    log.append(rest.decode("utf-8", "replace"))
    os.close(read)
    os.close(target)


def root_cause(lines: Iterable[str]) -> str | None:
    """The last error in a log that does not just report another one; None without one."""
    found = (match for line in reversed(list(lines)) if (match := _CAUSE.search(line)) and not _ECHO.search(line))
    match = next(found, None)
    return None if match is None else f"{match[1]}: {match[2].strip()}"


# ---- capture -------------------------------------------------------------------------------------------------------


def capture_vllm(request: Request, rlkernel: bool = False) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Args:
        rlkernel: compute with rlkernel's plugin.

    Raises:
        DriftError: vLLM is missing, does not start, or stops.
    """
    recording, operators = request.operators != "none", Operators()
    with _started(request, rlkernel) as engine:
        if recording:
            engine.collective_rpc("rlkernel_drift_start", args=(request.operator_count,))
        if request.tokens is None:
            bare = _sampled(request, engine)
            if recording:  # saved before the same tokens are scored
                operators = _operators(request, engine, bare)
        else:
            bare = tokens_only(request.tokens)
        streams = {**bare.logprobs, f"{request.phase}.raw": _scored(engine, bare)}
        if recording and request.tokens is not None:
            operators = _operators(request, engine, bare)
        config = {**_config(engine), **engine.collective_rpc("rlkernel_drift_about")[0], "dtype": request.dtype}
        weights, left_out = _weights(request, engine)
        fields = {"contract": _contract(engine), "left_out": left_out}
        return captured(request, bare, streams, operators, "vllm", config, weights, **fields)


def _settings(request: Request, rlkernel: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; those of the request have precedence."""
    settings: dict[str, Any] = {
        "model": str(request.model.resolve()),
        "dtype": request.dtype,
        "seed": request.seed,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "worker_extension_cls": _WORKER,
    }
    if request.operators in ("full", "rows"):
        settings |= {"enforce_eager": True, "max_num_batched_tokens": _STEP, "max_num_seqs": _SEQUENCES}
    settings |= request.engine
    additional = dict(settings.get("additional_config") or {})
    if rlkernel:
        additional["use_rl_kernel_backend"] = True
    if request.operators != "none":
        additional["rlkernel_drift"] = "fingerprint" if request.operators == "fingerprint" else "values"
    return settings | ({"additional_config": additional} if additional else {})


@contextlib.contextmanager
def _started(request: Request, rlkernel: bool) -> Iterator[Any]:
    """An engine while the block runs.

    Raises:
        DriftError: it does not start, or stops inside the block; the message holds the cause from its log.
    """
    try:
        from vllm import LLM
    except ImportError:
        raise DriftError("this engine needs vLLM: pip install 'rlkernel[vllm]'") from None
    with teed_output() as log:
        try:
            engine = LLM(**_settings(request, rlkernel))
        except Exception as failed:  # vLLM raises many types here
            engine, error = None, failed
    if engine is None:
        why = root_cause(log) or f"{type(error).__name__}: {error}"
        hint = """--engine-args passes settings to it, as in --engine-args '{"gpu_memory_utilization": 0.5}'"""
        raise DriftError(f"vLLM does not start: {why} ({hint})")
    died = _died()
    try:
        if rlkernel and _contract(engine) is None:
            raise DriftError(
                "vLLM does not compute with rlkernel: check that it is installed and that VLLM_PLUGINS allows it"
            )
        yield engine
    except died as error:
        # the engine's process still writes into the log of its start
        time.sleep(0.5)
        why = root_cause(log) or f"{type(error).__name__}: {error}"
        raise DriftError(f"vLLM stopped while it computed: {why}") from None
    finally:
        _stop(engine)


def _died() -> tuple[type[Exception], ...]:
    """The exceptions that vLLM raises after its engine has stopped; empty for versions without these classes."""
    try:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
    except ImportError:
        return ()
    return EngineDeadError, EngineGenerateError


def _stop(engine: Any) -> None:
    """Frees the device's memory, because the other side may be computed next."""
    import gc

    import torch

    shutdown = getattr(engine.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    engine.llm_engine = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _config(engine: Any) -> dict[str, Any]:
    """Settings of the engine that can change numbers."""
    config = engine.llm_engine.vllm_config
    found: dict[str, Any] = {
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", None),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
    }
    head = str(getattr(config.model_config, "head_dtype", config.model_config.dtype)).removeprefix("torch.")
    if _contract(engine) is not None:  # rlkernel computes logits in fp32
        head = "float32"
    found |= {"head_dtype": head, "logits_dtype": head}
    found |= {name.lower().removeprefix("vllm_"): os.environ[name] for name in _SETTINGS if name in os.environ}
    return found


def _contract(engine: Any) -> str | None:
    """rlkernel's contract, where its plugin computes the model."""
    try:
        status = engine.collective_rpc("rlkernel_status")[0]
    except Exception:  # other workers lack the method, and executors wrap the error in types of their own
        return None
    return str(status["contract"]) if status.get("exact") else None


def _weights(request: Request, engine: Any) -> tuple[dict[str, WeightFingerprint] | None, list[str]]:
    """Fingerprints of the weights, of the model's files where the engine repacks them; and what was left out."""
    if not request.weights:
        return None, []
    held = engine.collective_rpc("rlkernel_drift_weights")[0]
    if held is None:
        reason = "fingerprints of the weights in memory (the engine repacks them; the model's files were hashed)"
        return fingerprints(read_weights(request.model)), [reason]
    return {name: WeightFingerprint(**values) for name, values in held.items()}, []


def _sampled(request: Request, engine: Any) -> Capsule:
    from vllm import SamplingParams

    prompts = [ids for ids in prompt_ids(request) for _ in range(request.samples)]
    s = request.sampling
    params = [
        SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k or -1,
            top_p=s.top_p,
            min_p=s.min_p,
            max_tokens=request.max_tokens,
            seed=request.seed + i,
            logprobs=0,
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    completions = [list(o.outputs[0].token_ids) for o in outputs]
    values = [
        [float(step[token].logprob) for step, token in zip(o.outputs[0].logprobs, c, strict=True)]
        for o, c in zip(outputs, completions, strict=True)
    ]
    return build_capsule(Manifest(), prompts, completions, {"recorded.processed": values})


def _scored(
    engine: Any, bare: Capsule, order: Callable[[list[int]], list[int]] = list, alone: bool = False
) -> np.ndarray:
    """Prompt log-probabilities of the counted tokens, which vLLM computes from the raw logits.

    Args:
        order: maps the numbers of the sequences to their order in the queue.
        alone: score one sequence at a time.
    """
    from vllm import SamplingParams

    sequences = counted_sequences(bare)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = [s.tolist() for s in sequences.ids]
    queue = order(list(range(len(ids))))
    outputs: list[Any] = [None] * len(ids)
    for part in [[i] for i in queue] if alone else [queue]:
        asked = [{"prompt_token_ids": ids[i]} for i in part]
        for i, output in zip(part, engine.generate(asked, params, use_tqdm=False), strict=True):
            outputs[i] = output
    values = [
        float(o.prompt_logprobs[int(row) + 1][tokens[int(row) + 1]].logprob)
        for o, tokens, rows in zip(outputs, ids, sequences.rows, strict=True)
        for row in rows
    ]
    return stream_of(bare, sequences, values)


# ---- the engine against itself -------------------------------------------------------------------------------------


def permuted(request: Request, rlkernel: bool = False) -> dict[str, np.ndarray]:  # name -> [N]
    """Raw log-probabilities of the counted tokens, scored as prompts in several batches, orders and chunks.

    Those of decoding are included where temperature and filters do not change them.
    """
    found: dict[str, np.ndarray] = {}
    with _started(request, rlkernel) as engine:
        bare = request.tokens or _sampled(request, engine)
        token = sequences_of(bare).token.numpy()
        found["as it is"] = _scored(engine, bare)[token]
        found["other order"] = _scored(engine, bare, lambda rows: rows[::-1])[token]
        found["each sequence alone"] = _scored(engine, bare, alone=True)[token]
        if request.tokens is None and request.sampling.temperature == 1 and not request.sampling.filters:
            found["decoded"] = bare.logprobs["recorded.processed"][token]
    chunked = {
        "max_num_batched_tokens": _CHUNK,
        "max_num_seqs": min(_CHUNK, request.engine.get("max_num_seqs", _CHUNK)),
    }
    with _started(replace(request, engine={**request.engine, **chunked}), rlkernel) as engine:
        found["chunked prefill"] = _scored(engine, bare)[token]
    return found


# ---- operators -----------------------------------------------------------------------------------------------------


def _operators(request: Request, engine: Any, bare: Capsule) -> Operators:
    """The rows that the worker recorded, in the capsule's order of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.safetensors"
        names = engine.collective_rpc("rlkernel_drift_save", args=(str(file),))[0]
        if not names:
            raise DriftError("vLLM's worker recorded no operator: its model runs without calling the hooks")
        values = parse_tensors(read_bytes(file, 1 << 40, "recorded rows"), file.name, DEFAULT_LIMITS)
    owner, position, ids = (values[name].values.astype(np.int64) for name in ("request", "positions", "ids"))
    token = _tokens_of(bare, owner, position, ids)
    # a preempted request computes rows again, and the last one counts
    token, row = np.unique(token[::-1], return_index=True)
    row = len(owner) - 1 - row
    if request.operators == "rows" and len(row) > request.operator_rows:
        chosen = np.unique(np.linspace(0, len(row) - 1, request.operator_rows).round().astype(np.int64))
        token, row = token[chosen], row[chosen]
    kept = [name for name in names if name not in ("request", "positions", "ids")]
    found = {name: Tensor(np.ascontiguousarray(values[name].values[row]), values[name].dtype) for name in kept}
    return Operators(None if len(token) == bare.tokens else token, dict(sorted(found.items(), key=_computed)))


def _tokens_of(bare: Capsule, owner: np.ndarray, position: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The capsule's token of each row; requests are numbered in the order of the sequences.

    Raises:
        DriftError: the token id of a row is not the one that the sequence has there.
    """
    token = bare.cu_seqlens[owner] + position
    inside = token < bare.cu_seqlens[owner + 1]
    good = inside & (bare.ids[np.where(inside, token, 0)] == ids)
    if not good[inside].all():
        raise DriftError(
            "recorded rows do not match the sampled tokens: this version of vLLM orders its batches differently"
        )
    return token


_ORDER = (
    "input_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "attention", "o_proj", "attention_residual",
    "post_norm", "gate_proj", "up_proj", "activation", "down_proj", "output",
)  # fmt: skip


def _computed(item: tuple[str, Tensor]) -> tuple[int, int]:
    """Sort key: the place of an operator in the order of computation."""
    name = item[0]
    if not name.startswith("layers."):
        return (-1, 0) if name == "embedding" else (1 << 30, 0)
    _, layer, operator = name.split(".")
    return int(layer), _ORDER.index(operator)
