"""Capture from vLLM: samples with a seed a request, then scores its own tokens as prompts, without prefix cache.

The model runs as the installed vLLM runs it; with the plugin of rlkernel installed and asked for, that is its model.
Operators are recorded while it samples: hashes in the engine as it is, values in eager mode (`vllm_worker`). What this
process and those that it starts print goes on to where it went before, and its end is kept: vLLM tells there alone why
its engine does not start.
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
from collections.abc import Callable, Iterator
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
    Weights,
    build_capsule,
    describe_operators,
)
from rlkernel_drift.capsule.strict_json import DEFAULT_LIMITS
from rlkernel_drift.capsule.tensor_file import parse_tensors, read_bytes
from rlkernel_drift.capture.request import Request, Texts, manifest_of, read_prompts, weights_of
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints, read_weights

_LINES = 2000
_CAUSE = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)): (.+)")
# What the processes around the one that failed say: that it failed.
_ECHO = re.compile(r"initialization failed|failed to start|See (?:stack trace|root cause)", re.IGNORECASE)


@contextlib.contextmanager
def overheard() -> Iterator[deque[str]]:
    """Yields the last lines of standard output and standard error while the block runs.

    Processes that the block starts keep writing through it afterwards.
    """
    heard: deque[str] = deque(maxlen=_LINES)
    threads = []
    kept = {}
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        kept[number] = os.dup(number)
        read, write = os.pipe()
        os.dup2(write, number)
        os.close(write)
        threads.append(threading.Thread(target=_pass_on, args=(read, os.dup(kept[number]), heard), daemon=True))
        threads[-1].start()
    try:
        yield heard
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(kept[number], number)
            os.close(kept[number])
        # A process that still runs holds its end open; one that failed has closed it.
        for thread in threads:
            thread.join(0.5)


def _pass_on(read: int, target: int, heard: deque[str]) -> None:
    rest = b""
    while part := os.read(read, 1 << 16):
        # Nobody may wait because the reader of our own output has gone.
        with contextlib.suppress(OSError):
            os.write(target, part)
        *lines, rest = (rest + part).split(b"\n")
        heard.extend(line.decode("utf-8", "replace") for line in lines)
        rest = rest[-(1 << 16) :]
    heard.append(rest.decode("utf-8", "replace"))
    os.close(read)
    os.close(target)


def cause(lines: list[str]) -> str | None:
    """The last error in lines of a log, what merely repeats that something failed left out; None without one."""
    found = (match for line in reversed(lines) if (match := _CAUSE.search(line)) and not _ECHO.search(line))
    match = next(found, None)
    return None if match is None else f"{match[1]}: {match[2].strip()}"


_SETTINGS = ("VLLM_BATCH_INVARIANT", "VLLM_ATTENTION_BACKEND")
_WORKER = "rlkernel_drift.capture.vllm_worker.Recording"
_CHUNK = 16  # tokens of a step of the chunked engine of a floor
_STEP, _SEQUENCES = 1024, 128  # of a step where whole values are kept until its end


def capture_vllm(request: Request, rlkernel: bool = False) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Args:
        rlkernel: compute with rlkernel's plugin.

    Raises:
        DriftError: vLLM is missing, or does not start.
    """
    with _started(request, rlkernel) as engine:
        return _captured(request, engine)


def _captured(request: Request, engine: Any) -> Capsule:
    texts = Texts(request.model)
    recording = request.operators != "none"
    if recording:
        engine.collective_rpc("rlkernel_drift_start", args=(request.operator_count,))
    if request.tokens is None:
        bare = _sampled(request, engine, texts)
    else:
        bare = replace(request.tokens, logprobs={}, operators=Operators(), distribution=None, manifest=Manifest())
    streams = dict(bare.logprobs)
    phase = "train" if request.side == "train" else "prefill"
    operators = _operators(request, engine, bare) if recording and request.tokens is None else None
    streams[f"{phase}.raw"] = _scored(engine, bare)
    if operators is None:
        operators = _operators(request, engine, bare) if recording else Operators()
    about = engine.collective_rpc("rlkernel_drift_about")[0]
    weights, left_out = _weights(request, engine)
    manifest = manifest_of(
        request,
        "vllm",
        {**_config(engine), **about, "dtype": request.dtype},
        contract=_contract(engine),
        weights=weights,
        left_out=left_out,
        vocabulary=texts.vocabulary(bare.ids),
        operators=describe_operators(operators),
    )
    return replace(bare, manifest=manifest, logprobs=streams, operators=operators)


def _settings(request: Request, rlkernel: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; those of the request win."""
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
        DriftError: it does not start, or stops inside the block; its log says why.
    """
    try:
        from vllm import LLM
    except ImportError:
        raise DriftError("this engine needs vLLM: pip install 'rlkernel[vllm]'") from None
    with overheard() as heard:
        try:
            engine = LLM(**_settings(request, rlkernel))
        except Exception as failed:  # of whatever type vLLM raises: without an engine there is nothing to capture
            engine, error = None, failed
    if engine is None:
        why = cause(list(heard)) or f"{type(error).__name__}: {error}"
        hint = """--engine-args passes settings to it, as in --engine-args '{"gpu_memory_utilization": 0.5}'"""
        raise DriftError(f"vLLM does not start: {why} ({hint})")
    died = _died()
    try:
        if rlkernel and _contract(engine) is None:
            raise DriftError("vLLM does not compute with rlkernel: is it installed, and does VLLM_PLUGINS allow it?")
        yield engine
    except died as error:
        # The engine's own process goes on writing to what was listened to while it started.
        time.sleep(0.5)
        why = cause(list(heard)) or f"{type(error).__name__}: {error}"
        raise DriftError(f"vLLM stopped while it computed: {why}") from None
    finally:
        _stop(engine)


def _died() -> tuple[type[Exception], ...]:
    """What vLLM raises where its engine has stopped; none in versions that have no such class."""
    try:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
    except ImportError:
        return ()
    return EngineDeadError, EngineGenerateError


def _stop(engine: Any) -> None:
    """Gives the device's memory back: the other side may be computed next."""
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
    if _contract(engine) is not None:  # rlkernel's logits are fp32 sums, never rounded
        head = "float32"
    found |= {"head_dtype": head, "logits_dtype": head}
    found |= {name.lower().removeprefix("vllm_"): os.environ[name] for name in _SETTINGS if name in os.environ}
    return found


def _contract(engine: Any) -> str | None:
    """The contract of the numbers where the plugin of rlkernel computes them."""
    try:
        status = engine.collective_rpc("rlkernel_status")[0]
    except Exception:  # the method exists in workers that compute with rlkernel alone; executors wrap what they raise
        return None
    return str(status["contract"]) if status.get("exact") else None


def _weights(request: Request, engine: Any) -> tuple[Weights | None, list[str]]:
    """Fingerprints of the weights in the worker, or of the files where the engine repacks them; what is missing."""
    if not request.weights:
        return None, []
    held = engine.collective_rpc("rlkernel_drift_weights")[0]
    if held is None:
        found = fingerprints(read_weights(request.model))
        return weights_of(found), ["the engine repacks its weights: the files of its model were hashed instead"]
    return weights_of({name: WeightFingerprint(**values) for name, values in held.items()}), []


def _sampled(request: Request, engine: Any, texts: Texts) -> Capsule:
    from vllm import SamplingParams

    if request.prompts is None:
        raise DriftError("capture needs --prompts, or --tokens with a capsule")
    prompts = [texts.ids(p) for p in read_prompts(request.prompts) for _ in range(request.samples)]
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
    """Prompt log-probabilities of the counted tokens: always those of the raw logits.

    Args:
        order: of the sequences in the queue. alone: one sequence at a time.
    """
    from vllm import SamplingParams

    sequences = sequences_of(bare)
    if not sequences.counted:
        raise DriftError("there is no token to score: every mask is empty")
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
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = np.array(values, np.float32)
    return stream


# ---- the engine against itself -------------------------------------------------------------------------------------


def permuted(request: Request, rlkernel: bool = False) -> dict[str, np.ndarray]:  # name -> [N]
    """Raw log-probabilities of the counted tokens, scored as prompts in several batches, orders and chunks.

    Sampled tokens are decoded too, where nothing was scaled or filtered.
    """
    found: dict[str, np.ndarray] = {}
    with _started(request, rlkernel) as engine:
        bare = request.tokens or _sampled(request, engine, Texts(request.model))
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
    """What the worker kept, in the capsule's order of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.safetensors"
        names = engine.collective_rpc("rlkernel_drift_save", args=(str(file),))[0]
        if not names:
            raise DriftError("vLLM's worker recorded nothing; it runs in a way that hooks do not see")
        values = parse_tensors(read_bytes(file, 1 << 40, "recorded rows"), file.name, DEFAULT_LIMITS)
    owner, position, ids = (values[name].values.astype(np.int64) for name in ("request", "positions", "ids"))
    token = _tokens_of(bare, owner, position, ids)
    # A request that was preempted computes rows again; the last counts.
    token, row = np.unique(token[::-1], return_index=True)
    row = len(owner) - 1 - row
    if request.operators == "rows" and len(row) > request.operator_rows:
        chosen = np.unique(np.linspace(0, len(row) - 1, request.operator_rows).round().astype(np.int64))
        token, row = token[chosen], row[chosen]
    kept = [name for name in names if name not in ("request", "positions", "ids")]
    found = {name: Tensor(np.ascontiguousarray(values[name].values[row]), values[name].dtype) for name in kept}
    return Operators(None if len(token) == bare.tokens else token, dict(sorted(found.items(), key=_computed)))


def _tokens_of(bare: Capsule, owner: np.ndarray, position: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The capsule's token of each row; requests were numbered in the order of their sequences.

    Raises:
        DriftError: a row's token id is another than the sequence has there.
    """
    token = bare.cu_seqlens[owner] + position
    inside = token < bare.cu_seqlens[owner + 1]
    good = inside & (bare.ids[np.where(inside, token, 0)] == ids)
    if not good[inside].all():
        raise DriftError("recorded rows and sampled tokens do not fit: this vLLM orders its batches in an unknown way")
    return token


_ORDER = (
    "input_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "attention", "o_proj", "attention_residual",
    "post_norm", "gate_proj", "up_proj", "activation", "down_proj", "output",
)  # fmt: skip


def _computed(item: tuple[str, Tensor]) -> tuple[int, int]:
    """Place of an operator in the order of computation."""
    name = item[0]
    if not name.startswith("layers."):
        return (-1, 0) if name == "embedding" else (1 << 30, 0)
    _, layer, operator = name.split(".")
    return int(layer), _ORDER.index(operator)
