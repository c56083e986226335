"""Runs vLLM in a process of its own: `python vllm_side.py '[["SCENARIO", "FOLDER", {arguments}], ...]'` prints one JSON
line, a list with one result per scenario.

vLLM keeps state in its process and starts others, which import the main module again; so scenarios are a script, and
the tests look at what it prints. Several share a process, since importing vLLM takes ten seconds. A comparison is
[differing numbers, numbers].
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from vllm_refusals import broken, checks, refusals
from vllm_steps import steps
from vllm_tensor_parallel import ranks
from vllm_vision import media

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS))

PROMPTS = (17, 40, 77, 100, 3, 64, 33, 90)
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "enforce_eager": True,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}


def prompts(vocabulary: int, lengths: tuple[int, ...] = PROMPTS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


# ---- the engine ----------------------------------------------------------------------------------


def engine(folder: str, on: bool | None = True, **changes: Any) -> Any:
    import rlkernel_vllm

    settings = {"model": folder, "skip_tokenizer_init": True, **ENGINE, **changes}
    return rlkernel_vllm.LLM(use_rl_kernel_backend=on, **settings)


def generate(llm: Any, ids: list[list[int]], count: int = 24, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    given = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, **sampling}
    parameters = SamplingParams(max_tokens=count, **given)
    return llm.generate([{"prompt_token_ids": p} for p in ids], parameters, use_tqdm=False)


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def sampled(output: Any) -> list[float]:
    """Log-probabilities of the sampled tokens."""
    return [row[t].logprob for t, row in zip(tokens(output), output.outputs[0].logprobs, strict=True)]


def prompted(output: Any) -> list[float]:
    """Log-probabilities of the prompt's tokens, from the second on."""
    return [row[t].logprob for t, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]


def listed(rows: Any, vocabulary: int) -> torch.Tensor:  # [T, V]
    """Log-probabilities of every token; NaN where the list has none."""
    out = torch.full((len(rows), vocabulary), float("nan"))
    for i, row in enumerate(rows):
        for token, entry in row.items():
            out[i, token] = entry.logprob
    return out


# ---- the trainer ---------------------------------------------------------------------------------


class Trainer:
    """Training forwards of the same weights: `rlkernel.models`, and transformers after `apply`."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        import rlkernel_transformers
        from rlkernel.models import load_model

        self.decoder = load_model(folder, dtype=dtype)
        self.hf = rlkernel_transformers.apply(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))

    def logits(self, ids: list[int]) -> torch.Tensor:  # [T, V] fp32
        from rlkernel.models.batch import PackedBatch

        with torch.no_grad():
            return self.decoder.logits(self.decoder(PackedBatch.from_sequences([ids])))

    def hashes(self, ids: list[int]) -> list[int]:
        """A hash of each row of hidden states, as rlkernel-drift makes them."""
        from rlkernel.models.batch import PackedBatch
        from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch

        with torch.no_grad():
            hidden = self.decoder(PackedBatch.from_sequences([ids]))
        return row_fingerprints_torch(hidden, multipliers_torch(hidden.shape[1], "cpu")).tolist()

    def scores(self, ids: list[int], temperature: float = 1.0, kept: torch.Tensor | None = None) -> list[float]:
        """Log-probability of each token after the first; the two forwards must agree."""
        import rlkernel_transformers
        from rlkernel import ops

        targets = torch.tensor(ids[1:])
        own = ops.logprob(self.logits(ids)[:-1], targets, temperature=temperature, kept=kept).logp.tolist()
        with torch.no_grad():
            found = rlkernel_transformers.token_logprobs(
                self.hf,
                torch.tensor([ids]),
                targets=torch.tensor([[*ids[1:], -100]]),
                temperature=temperature,
                kept=kept,
            ).logp[0, :-1]
        assert own == found.tolist(), "rlkernel.models and rlkernel_transformers differ"
        return own


def hashed_rows(llm: Any, file: Path) -> list[int]:
    """Hashes of the final norm's rows that an engine's worker recorded, request by request."""
    from safetensors.torch import load_file

    llm.collective_rpc("rlkernel_drift_save", args=(str(file),))
    rows = load_file(file)
    order = sorted(range(len(rows["ids"])), key=lambda i: (int(rows["request"][i]), int(rows["positions"][i])))
    return [int(rows["final_norm"][i]) for i in order]


def differing(one: list[Any], other: list[Any]) -> list[int]:
    assert len(one) == len(other) > 0
    return [sum(a != b for a, b in zip(one, other, strict=True)), len(one)]


def against(trainer: Trainer, ids: list[list[int]], outputs: list[Any], temperature: float = 1.0) -> list[int]:
    """Sampled log-probabilities of all outputs against the trainer's."""
    ours, theirs = [], []
    for prompt, output in zip(ids, outputs, strict=True):
        ours += sampled(output)
        theirs += trainer.scores(prompt + tokens(output), temperature)[len(prompt) - 1 :]
    return differing(ours, theirs)


# ---- scenarios -----------------------------------------------------------------------------------


def matrix(folder: str, vocabulary: int, dtype: str, **changes: Any) -> dict[str, Any]:
    """Every way of computing a log-probability, against the training forward."""
    llm = engine(folder, dtype=dtype, max_num_batched_tokens=512, **changes)
    trainer, ids = Trainer(folder, getattr(torch, dtype)), prompts(vocabulary)
    out: dict[str, Any] = {}
    alone = generate(llm, ids[:1])[0]
    out["decode"] = against(trainer, ids[:1], [alone])
    batched = generate(llm, ids)
    out["batched"] = against(trainer, ids, batched)
    out["alone and batched"] = differing(sampled(alone), sampled(batched[0]))
    sequence = ids[3] + tokens(batched[3])
    scored = generate(llm, [sequence, *ids], 1, prompt_logprobs=0)
    out["prompt"] = differing(prompted(scored[0]), trainer.scores(sequence))
    long = [list(chain(*ids[:4]))]
    cold, warm = generate(llm, long)[0], generate(llm, long)[0]
    out["cached tokens"] = warm.num_cached_tokens
    out["prefix cached"] = against(trainer, long, [warm])
    out["cold and cached"] = differing(sampled(cold), sampled(warm))
    # Lists: the most likely tokens, and the whole vocabulary.
    top = generate(llm, ids[:2], 4, logprobs=5, prompt_logprobs=3)[1]
    whole = torch.log_softmax(trainer.logits(ids[1] + tokens(top)), -1)
    rows = listed([*top.prompt_logprobs[1:], *top.outputs[0].logprobs], vocabulary)
    exact = full(trainer.logits(ids[1] + tokens(top)))
    given = ~rows.isnan()
    out["lists"] = [int((rows != exact[:-1])[given].sum()), int(given.sum())]
    assert torch.allclose(exact, whole, atol=1e-4)
    out["status"] = vars(__import__("rlkernel_vllm").status(llm))
    return out


def full(logits: torch.Tensor) -> torch.Tensor:  # [T, V] -> [T, V]
    """Log-probability of every token, with one call of the op per token."""
    from rlkernel import ops

    columns = [ops.logprob(logits, torch.full((logits.shape[0],), v)).logp for v in range(logits.shape[1])]
    return torch.stack(columns, 1)


def sampling(folder: str, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Processed log-probabilities: temperature, kept sets, and rows of several kinds in one batch."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    from rlkernel import ops
    from rlkernel_vllm.config import request_problem

    changes = {"logprobs_mode": "processed_logprobs", "max_logprobs": vocabulary, "max_num_batched_tokens": 64}
    llm = engine(folder, dtype=dtype, **changes)  # 64 tokens a step: prompts are chunked
    trainer, ids = Trainer(folder, getattr(torch, dtype)), prompts(vocabulary)
    out: dict[str, Any] = {}
    out["temperature"] = against(trainer, ids, generate(llm, ids, temperature=0.7), 0.7)
    # vLLM removes forbidden tokens of a grammar from the logits before it computes log-probabilities.
    grammar = {"structured_outputs": StructuredOutputsParams(regex="a+")}
    try:
        generate(llm, ids[:1], **grammar)
    except VLLMValidationError as error:  # a server answers 400
        out["grammar"] = str(error)
    assert request_problem(SamplingParams(logprobs=None, **grammar)) is None
    # Seeds: a draw that vLLM undoes, for a prompt with more chunks to come, does not consume the request's noise.
    llm.reset_prefix_cache()
    seeded = [generate(llm, ids, temperature=0.7, seed=7) for _ in ("in chunks", "from the prefix cache")]
    out["seeded"] = against(trainer, ids, seeded[0], 0.7)
    out["seeded, drawn again"] = differing(*(list(chain(*map(tokens, outputs))) for outputs in seeded))
    filters = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01}]
    mixed = [
        SamplingParams(max_tokens=12, logprobs=-1, ignore_eos=True, detokenize=False, **kind)
        for kind in [{"temperature": 0.0}, {"temperature": 1.0}, *({"temperature": 0.8, **f} for f in filters)]
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in ids[: len(mixed)]], mixed, use_tqdm=False)
    for parameters, prompt, output in zip(mixed, ids, outputs, strict=False):
        sequence = prompt + tokens(output)
        logits = trainer.logits(sequence)[len(prompt) - 1 : -1]
        n, on = logits.shape[0], parameters.temperature > 0
        vector = lambda value, kind, n=n: torch.full((n,), value, dtype=kind)
        zeros = torch.zeros(n, dtype=torch.int64)
        kept = ops.sample(
            logits, zeros, zeros, temperature=vector(parameters.temperature, torch.float32),
            top_k=vector(parameters.top_k if on and parameters.top_k > 0 else 0, torch.int32),
            top_p=vector(parameters.top_p if on else 1.0, torch.float32),
            min_p=vector(parameters.min_p if on else 0.0, torch.float32), return_kept=True,
        ).kept  # fmt: skip
        targets = torch.tensor(tokens(output))
        expected = ops.logprob(logits, targets, temperature=parameters.temperature if on else 1.0, kept=kept)
        name = "kept " + ", ".join(f"{k}={getattr(parameters, k)}" for k in ("temperature", "top_k", "top_p", "min_p"))
        out[name] = differing(sampled(output), expected.logp.tolist())
        rows = listed(output.outputs[0].logprobs, vocabulary)
        allowed = ops.unpack_kept(kept, vocabulary)
        out["set of " + name] = [int((torch.isfinite(rows) != allowed).sum()), rows.numel()]
    return out


def weights(folder: str, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Fingerprints, and updates of weights in both of the ways a trainer has."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    import rlkernel_vllm

    llm, ids = engine(folder, dtype=dtype, enable_sleep_mode=False), prompts(vocabulary)[:3]
    out: dict[str, Any] = {}
    mine, theirs = rlkernel_vllm.fingerprints(llm), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    out["tensors"] = len(mine)
    out["equal at start"] = rlkernel_vllm.compare(mine, rlkernel_vllm.fingerprints(theirs))
    generator = torch.Generator().manual_seed(1)
    state = load_file(Path(folder) / "model.safetensors")
    state = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in state.items()}
    updated = Path(folder + "-updated")
    updated.mkdir(exist_ok=True)
    for file in Path(folder).glob("*.json"):
        (updated / file.name).write_bytes(file.read_bytes())
    save_file(state, updated / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(str(updated), getattr(torch, dtype))
    wanted = rlkernel_vllm.fingerprints(AutoModelForCausalLM.from_pretrained(updated, dtype=dtype))
    out["stale"] = sorted(rlkernel_vllm.compare(mine, wanted))
    generate(llm, ids)  # fills the prefix cache with keys that are stale after the update
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    for name, tensor in state.items():  # as TRL does
        model.load_weights([(name, tensor)])
    llm.reset_prefix_cache()
    out["equal after load_weights"] = rlkernel_vllm.compare(rlkernel_vllm.fingerprints(llm), wanted)
    out["after load_weights"] = against(trainer, ids, generate(llm, ids))
    llm.collective_rpc("reload_weights")  # from the initial checkpoint
    llm.reset_prefix_cache()
    out["equal after reload_weights"] = rlkernel_vllm.compare(rlkernel_vllm.fingerprints(llm), mine)
    out["after reload_weights"] = against(Trainer(folder, getattr(torch, dtype)), ids, generate(llm, ids))
    return out


def compiled(folder: str, vocabulary: int, dtype: str) -> dict[str, Any]:
    """vLLM's defaults: engine and worker in their own processes, torch.compile on; additional_config sets the flag.

    rlkernel-drift records row hashes of its operators, which must not change a bit of it.
    """
    import vllm

    import rlkernel_vllm

    asked = {
        "additional_config": {"use_rl_kernel_backend": True, "rlkernel_drift": "fingerprint"},
        "worker_extension_cls": "rlkernel_drift.capture.vllm_worker.Recording",
        "enforce_eager": False,
    }
    llm = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, **{**ENGINE, **asked})
    llm.collective_rpc("rlkernel_drift_start", args=(2,))
    trainer, ids = Trainer(folder, getattr(torch, dtype)), prompts(vocabulary)
    status = rlkernel_vllm.assert_active(llm)
    batched = generate(llm, ids)
    hashed = hashed_rows(llm, Path(folder).parent / "rows.safetensors")
    scored = generate(llm, [ids[1] + tokens(batched[1])], 1, prompt_logprobs=0)[0]
    sequences = [p + tokens(o) for p, o in zip(ids[:2], batched[:2], strict=True)]
    return {
        "hashes": differing(hashed, [h for s in sequences for h in trainer.hashes(s[:-1])]),
        "batched": against(trainer, ids, batched),
        "prompt": differing(prompted(scored), trainer.scores(ids[1] + tokens(batched[1]))),
        "status": vars(status),
        "tensors": len(rlkernel_vllm.fingerprints(llm)),
    }


def switched(folder: str, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Engines with and without the flag, one after another in one process; the environment sets the last one's."""
    import gc

    import rlkernel_vllm
    from rlkernel_vllm import settings

    ids, out, readings = prompts(vocabulary)[:4], {}, []
    read = settings.read
    settings.read = lambda config: readings.append(config) or read(config)
    for name, on in (("off first", False), ("on", True), ("off", False), ("on again", None)):
        if on is None:
            os.environ["RLKERNEL_VLLM"] = "1"
        llm = engine(folder, on, dtype=dtype)
        outputs = generate(llm, ids)
        if "cost" not in out:
            out["cost"] = {"places": ours_in_vllm(), "modules": ours_loaded(), "readings": len(readings)}
            trainer = Trainer(folder, getattr(torch, dtype))
        scored = generate(llm, [p + tokens(o) for p, o in zip(ids, outputs, strict=True)], 1, prompt_logprobs=0)
        kinds = llm.apply_model(class_names)[0]
        out[name] = {
            "active": rlkernel_vllm.status(llm).active,
            "ours": sorted({kind for kind in kinds if "rlkernel" in kind}),
            "logprobs": list(chain(*map(sampled, outputs), *map(prompted, scored))),
            "against trainer": against(trainer, ids, outputs),
        }
        del llm
        gc.collect()
    return out


def ours_in_vllm() -> list[str]:
    """Attributes of vLLM's modules and classes that are functions or classes of rlkernel."""
    out = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm"):
            continue
        classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name]
        for owner in (module, *classes):
            for key, value in list(vars(owner).items()):
                value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                if isinstance(value, (FunctionType, type)) and _source(value).startswith("rlkernel"):
                    out.add(f"{getattr(owner, '__qualname__', name)}.{key}")
    return sorted(out)


def _source(value: Any) -> str:
    """Module that a function or a class was written in; `functools.wraps` copies `__module__`."""
    return str(value.__globals__["__name__"] if isinstance(value, FunctionType) else value.__module__)


def ours_loaded() -> list[str]:
    """Modules of rlkernel that this process has imported."""
    return sorted(name for name in sys.modules if name.split(".")[0].startswith("rlkernel"))


def class_names(model: Any) -> list[str]:
    kinds = [type(m) for m in model.modules()] + [type(getattr(m, "quant_method", None)) for m in model.modules()]
    kinds += [type(getattr(m, "impl", None)) for m in model.modules()]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def stock(folder: str, vocabulary: int, dtype: str) -> dict[str, Any]:
    """vLLM without the plugin (the caller sets VLLM_PLUGINS): its log-probabilities, and the detection."""
    import vllm

    import rlkernel_vllm

    ids = prompts(vocabulary)[:4]
    llm = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, **ENGINE)
    outputs = generate(llm, ids)
    scored = generate(llm, [p + tokens(o) for p, o in zip(ids, outputs, strict=True)], 1, prompt_logprobs=0)
    numbers = list(chain(*map(sampled, outputs), *map(prompted, scored)))
    plugin = sys.modules.get("rlkernel_vllm.plugin")
    found = {"logprobs": numbers, "loaded": bool(plugin and plugin._installed), "error": ""}
    try:
        engine(folder, True, dtype=dtype)
    except rlkernel_vllm.InactiveError as error:
        found["error"] = str(error)
    return found


def refused(folder: str, **changes: Any) -> dict[str, Any]:
    """The error of an engine in strict mode."""
    try:
        engine(folder, dtype="float32", **changes)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


ODD = """
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.models import llama

llama.RMSNorm = GemmaRMSNorm


class Extension:
    pass
"""


def refused_by_a_worker(folder: str) -> dict[str, Any]:
    """The front end's error for a worker in another process that builds a model of other modules."""
    place = Path(folder).parent
    (place / "odd_extension.py").write_text(ODD)
    sys.path.insert(0, str(place))  # child processes inherit it
    found = refused(folder, worker_extension_cls="odd_extension.Extension")
    return {**found, "left": "RLKERNEL_VLLM_REFUSAL" in os.environ}


def audit(folder: str, vocabulary: int) -> dict[str, Any]:
    """An unsupported model, admitted and reported."""
    import rlkernel_vllm

    llm = engine(folder, dtype="float32", rl_kernel_mode="audit", rl_kernel_attention="fa3")
    found = rlkernel_vllm.status(llm)
    return {
        "tokens": len(tokens(generate(llm, prompts(vocabulary)[:1], 8)[0])),
        "status": vars(found),
        "text": str(found),
    }


def audit_cache(folder: str, vocabulary: int) -> dict[str, Any]:
    """Audit mode allows and reports fp8 keys and values and more positions than the model has: attention is vLLM's, and
    everything else ours. vLLM has fp8 keys and values only on CPUs with AVX-512; on others they are bf16."""
    from vllm import envs

    import rlkernel_vllm

    asked = {"rl_kernel_mode": "audit"}  # as in the error of strict mode
    envs.disable_envs_cache()  # of earlier engines
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    fp8 = torch.cpu._is_avx512_supported()
    kind = "fp8" if fp8 else "auto"
    llm = engine(folder, dtype="bfloat16", additional_config=asked, kv_cache_dtype=kind, max_model_len=768)
    del os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"]
    found = rlkernel_vllm.status(llm)
    long = [[5] * 600]  # beyond the model's positions, as in stock vLLM
    return {
        "tokens": len(tokens(generate(llm, prompts(vocabulary)[:1], 8)[0])),
        "long": len(tokens(generate(llm, long, 8)[0])),
        "fp8": fp8,
        "status": vars(found),
    }


def prompt_ids(folder: str) -> dict[str, Any]:
    """Prompt log-probabilities of ids that a request names (V2 runner, vLLM from 0.31 on), without a GPU."""
    from types import SimpleNamespace

    import numpy as np
    from vllm.v1.worker.gpu.sample import prompt_logprob

    from rlkernel import ops
    from rlkernel_vllm import sampling_v2

    if not hasattr(prompt_logprob.PromptLogprobsWorker, "compute_prompt_token_id_logprobs"):
        return {}
    sampling_v2._install()
    worker = prompt_logprob.PromptLogprobsWorker(4, torch.device("cpu"))
    worker.__class__ = sampling_v2.ExactPromptLogprobs
    ids, logits = np.array([3, 1, 4]), torch.randn(6, 50)
    given = np.tile(ids, (5, 1)) if "pad" in prompt_logprob._TokenIdScores.__annotations__ else ids  # 0.32
    asked = {"prompt_logprobs": None, "prompt_logprob_token_ids": given, "prompt_logprob_start": 0}
    worker.add_request("a", 0, SimpleNamespace(**asked))
    batch = SimpleNamespace(
        req_ids=["a"], idx_mapping_np=np.array([0]), num_computed_prefill_tokens_np=np.array([0]),
        num_scheduled_tokens=np.array([6]), prefill_len_np=np.array([6]), query_start_loc_np=np.array([0, 6]),
    )  # fmt: skip
    scores = worker.compute_prompt_token_id_logprobs(lambda rows: rows, logits, batch, np.array([6]))["a"]
    wanted = [ops.logprob(logits[:5], torch.full((5,), int(token))).logp for token in ids]
    return {"ids": differing(scores.flatten().tolist(), torch.stack(wanted, 1).flatten().tolist())}


def drift(folder: str) -> dict[str, Any]:
    """`rlkernel-drift compare` of two engines, through the command line: stock against stock, ours against ours."""
    from rlkernel_drift.cli.main import main as command

    settings = ["--max-tokens", "12", "--profile", "bitwise", "--engine-args", json.dumps(ENGINE)]
    out: dict[str, Any] = {}
    for name, rollout, train, operators in (
        ("stock", "vllm", "hf", "full"),
        ("ours", "vllm+rlkernel", "hf+rlkernel", "fingerprint"),
    ):
        file = Path(folder).parent / f"{name}.json"
        sides = [f"{rollout}:{folder}", f"{train}:{folder}"]
        code = command(["compare", *sides, *settings, "--operators", operators, "--json", str(file)])
        out[name] = {"exit": code, "verdict": json.loads(file.read_text())}
    file, asked = Path(folder).parent / "prompts.jsonl", Path(folder).parent / "floor.json"
    file.write_text(json.dumps({"prompt": list(range(3, 40))}) + "\n" + json.dumps({"prompt": [5, 6, 7]}))
    options = ["--model", folder, "--prompts", str(file), "--dtype", "bfloat16", "--out", str(asked)]
    command(["floor", "--engine", "vllm", *options, "--max-tokens", "4", "--engine-args", json.dumps(ENGINE)])
    return {**out, "floor": json.loads(asked.read_text())}


def scratch(model: Any) -> dict[str, int]:
    """A layer's scratch memory in vLLM's profiling run, which is a call without metadata; and the number of calls."""
    from rlkernel import ops

    impl = model.model.layers[0].self_attn.attn.impl
    q, k = (torch.zeros(2, heads, impl.head_size) for heads in (impl.num_heads, impl.num_kv_heads))
    asked: list[dict[str, int]] = []

    def record(q: torch.Tensor, k: torch.Tensor, **most: int) -> int:
        asked.append({"heads": q.shape[-2], "kv heads": k.shape[-2], **most})
        return 1 << 20

    kept, ops.attention_scratch_bytes = ops.attention_scratch_bytes, record
    for kv_cache in (None, torch.empty(0), torch.empty(1)):  # the last one: its size is decided, a graph is captured
        impl.forward(None, q, k, k, kv_cache, None, output=q.clone())
    ops.attention_scratch_bytes = kept
    assert all(most == asked[0] for most in asked)
    return {**asked[0], "times": len(asked)}


def page(folder: str) -> dict[str, Any]:
    """Runs the page's example."""
    from pages import first_lines

    import rlkernel_vllm

    names: dict[str, Any] = {}
    exec(first_lines("vllm", folder), names)
    (output,) = [names["output"]]
    ids = list(output.prompt_token_ids) + tokens(output)
    expected = Trainer(folder, torch.bfloat16).scores(ids)[len(output.prompt_token_ids) - 1 :]
    llm = names["llm"]
    vllm_config = llm.llm_engine.vllm_config
    steps, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    return {
        "page": differing(sampled(output), expected),
        "exact": rlkernel_vllm.status(llm).exact,
        "scratch": llm.apply_model(scratch)[0],
        "limits": {"tokens": steps.max_num_batched_tokens, "sequences": steps.max_num_seqs, "longest": longest},
    }


SCENARIOS = (
    media,
    page,
    matrix,
    sampling,
    weights,
    compiled,
    switched,
    stock,
    refusals,
    refused,
    refused_by_a_worker,
    audit,
    drift,
    audit_cache,
    prompt_ids,
    checks,
    broken,
    steps,
    ranks,
)


def main() -> None:
    import gc

    torch.set_num_threads(1)
    results = []
    for name, folder, arguments in json.loads(sys.argv[1]):
        scenario = {s.__name__: s for s in SCENARIOS}[name]
        results.append(scenario(folder, **arguments))
        gc.collect()
    print("\nRESULT " + json.dumps(results, default=str), flush=True)
    os._exit(0)  # the parent ends the engines, which belong to its session


if __name__ == "__main__":
    main()
