"""vLLM under TRL: enables the plugin in the engine that TRL builds, and checks a server for it.

TRL has no field for engine arguments, so the engine class is replaced while TRL calls it. Each request gets its own
seed, so that a resumed run samples the same tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accelerate.utils import is_peft_model

from rlkernel import ops
from rlkernel_transformers import merged_weights
from rlkernel_trl.seeds import GenerationSeeds, request_seeds
from rlkernel_vllm.settings import ATTENTION, CONTRACT, FLAG, LEAVES

logger = logging.getLogger("rlkernel_trl")


def contract() -> str:
    """Contract id of the trainer, for the process's attention variant."""
    return ops.attention_contract(ops.current_attention_variant())


@contextlib.contextmanager
def engine_arguments(backend: Any) -> Iterator[None]:
    """A block in which an engine that TRL builds gets the plugin and the trainer's dtype."""
    from trl.generation import vllm_generation

    if not (backend.samples and backend.settings.use_vllm) or not hasattr(vllm_generation, "LLM"):
        yield
        return
    stock = vllm_generation.LLM

    @functools.wraps(stock)
    def build(*args: Any, **kwargs: Any) -> Any:
        import rlkernel_vllm

        rlkernel_vllm.register()  # the engine is in this process; vLLM loads the plugin itself if rlkernel is installed
        kwargs["dtype"] = str(backend.dtype).removeprefix("torch.")
        mode, attention = "strict" if backend.strict else "audit", ops.current_attention_variant()
        kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), CONTRACT: contract()}
        kwargs |= {"rl_kernel_mode": mode, "rl_kernel_attention": attention}
        kwargs["tp_leaves"] = backend.settings.rl_kernel_tp_leaves
        return rlkernel_vllm.LLM(*args, use_rl_kernel_backend=True, **kwargs)

    vllm_generation.LLM = build
    try:
        yield
    finally:
        vllm_generation.LLM = stock


def attach(backend: Any, trainer: Any) -> None:
    """Checks the engine or server of a constructed trainer, and records the log-probabilities that it returns."""
    generation = trainer.vllm_generation
    if is_peft_model(trainer.model) or trainer.is_fsdp_enabled:
        # TRL's own merges LoRA into the weights and subtracts again, and both roundings stay in the weights. Of FSDP2's
        # shards it gathers the fp32 masters.
        generation._iter_named_params = lambda: merged_weights(
            trainer.accelerator.unwrap_model(trainer.model), backend.dtype
        )
    if generation.mode == "server":
        if trainer.accelerator.is_main_process:
            check_server(backend, generation.vllm_client)
            _seed_server(generation.vllm_client, trainer)
    else:
        _seed_requests(backend, generation, trainer)
    generation.logprobs = generation.logprobs or 0  # RLOO asks for none
    stock = generation.generate

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        if result[2] is not None:
            backend.generation(trainer).captured = [[token[0] for token in row] for row in result[2]]
        return result

    generation.generate = generate


def check_server(backend: Any, client: Any) -> None:
    """Checks that a `vllm serve` process runs the plugin, exactly, with the trainer's contract and dtype, and returns
    processed log-probabilities.

    Raises:
        ExactnessLostError: it does not, in strict mode; the message has a command that starts such a server.
    """
    info = client.get_server_info()
    model = info.get("model_config") or {}
    dtype, variant = str(backend.dtype).removeprefix("torch."), ops.current_attention_variant()
    leaves = backend.settings.rl_kernel_tp_leaves
    flags = {FLAG: True, **({} if variant == "split" else {ATTENTION: variant})}
    flags |= {} if leaves == 1 else {LEAVES: leaves}
    line = (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {model.get('model', 'MODEL')} --dtype {dtype} "
        f"--additional-config '{json.dumps(flags)}' --logprobs-mode processed_logprobs "
        '--weight-transfer-config \'{"backend": "nccl"}\''
    )
    _check_workers(backend, client, info.get("additional_config") or {}, line)
    if dtype not in str(model.get("dtype", dtype)):
        backend.report_inexact(
            f"the vLLM server computes in {model.get('dtype')}, the trainer in {dtype}; start it with: {line}"
        )
    if model.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        backend.report_inexact(
            f"the vLLM server returns {model['logprobs_mode']}: log-probabilities without temperature; start it with: "
            f"{line}"
        )


def _check_workers(backend: Any, client: Any, asked: dict[str, Any], line: str) -> None:
    """Checks the workers themselves, because `VLLM_PLUGINS` may have left the plugin out."""
    url = f"{client.base_url}/collective_rpc"
    answer = client.session.post(url, json={"method": "rlkernel_status"}, timeout=120)
    if answer.status_code == 404:
        backend.report_inexact(
            f"the vLLM server at {client.base_url} has no /collective_rpc to ask; start it with: {line}"
        )
        return
    workers = answer.json().get("results") if answer.status_code == 200 else None
    if not workers or not all(isinstance(worker, dict) and worker.get("active") for worker in workers):
        on = str(asked.get(FLAG, False)).lower() in ("1", "true", "yes", "on")
        why = ""
        if on:
            why = (
                f", although {FLAG} is set: if its VLLM_PLUGINS is set, does it name rlkernel, and is rlkernel "
                "installed in its Python environment?"
            )
        backend.report_inexact(
            f"the vLLM server at {client.base_url} runs without rlkernel's plugin{why}; start it with: {line}"
        )
        return
    for worker in workers:
        if worker["contract"] != contract():
            backend.report_inexact(
                f"the vLLM server computes under contract {worker['contract']} (attention {worker['attention']}), the "
                f"trainer under {contract()}; use one rlkernel on both sides, and start it with: {line}"
            )
        if worker["tp_leaves"] != backend.settings.rl_kernel_tp_leaves:
            backend.report_inexact(
                f"the vLLM server computes with {LEAVES}={worker['tp_leaves']}, the trainer with rl_kernel_tp_leaves="
                f"{backend.settings.rl_kernel_tp_leaves}; start it with: {line}"
            )
        if not worker["exact"]:
            found = "; ".join(f"{name}: {reason}" for name, reason in worker["findings"])
            backend.report_inexact(f"the vLLM server is not exact with {found}; change that, and start it with: {line}")


def _seed_server(client: Any, trainer: Any) -> None:
    """Sends each prompt in a request of its own, with a seed derived from the run's seed, the step and its index.

    TRL sends all prompts in one request, which has one seed or none.
    """
    stock = client.generate
    generation_seeds = GenerationSeeds()

    @functools.wraps(stock)
    def generate(prompts: Any, features: Any = None, generation_kwargs: Any = None, **options: Any) -> Any:
        given = generation_kwargs or {}
        if features is not None or given.get("seed") is not None:
            return stock(prompts, features=features, generation_kwargs=given, **options)

        def ask(prompt: Any, seed: int) -> dict[str, Any]:
            answer: dict[str, Any] = stock([prompt], generation_kwargs={**given, "seed": seed % _SEEDS}, **options)
            return answer

        seeds = request_seeds(generation_seeds.next(trainer), 0, len(prompts))
        with ThreadPoolExecutor(min(_CONNECTIONS, len(prompts))) as pool:
            answers = list(pool.map(ask, prompts, seeds))
        return {name: list(itertools.chain.from_iterable(a[name] for a in answers)) for name in answers[0]}

    client.generate = generate


_CONNECTIONS = 64
_SEEDS = 1 << 63  # vLLM's are signed


def _seed_requests(backend: Any, generation: Any, trainer: Any) -> None:
    """Gives every request of a generation a seed derived from the run's seed, the step and the request's index."""
    llm = generation.llm
    stock = llm.generate
    size = generation.tensor_parallel_size
    group = trainer.accelerator.process_index // size
    generation_seeds = GenerationSeeds()

    @functools.wraps(stock)
    def generate(prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        if getattr(sampling_params, "seed", 0) is None:  # one object for all requests, and the user gave no seed
            first = group * size * backend.generation(trainer).rows
            seeds = request_seeds(generation_seeds.next(trainer), first, len(prompts))
            sampling_params = [_with_seed(sampling_params, seed % _SEEDS) for seed in seeds]
        token = getattr(generation.processing_class, "image_token_id", None)
        given = [_unexpanded(prompt, token) for prompt in prompts]
        outputs = stock(given, sampling_params=sampling_params, **kwargs)
        _check_expansion(backend, prompts, outputs)
        return outputs

    llm.generate = generate


def _unexpanded(prompt: dict[str, Any], token: int | None) -> dict[str, Any]:
    """A prompt with one placeholder per image. TRL gives one for each feature, which vLLM would expand once more."""
    if token is None or "multi_modal_data" not in prompt:
        return prompt
    ids = prompt["prompt_token_ids"]
    kept = [t for i, t in enumerate(ids) if t != token or i == 0 or ids[i - 1] != token]
    return {**prompt, "prompt_token_ids": kept}


def _check_expansion(backend: Any, prompts: list[dict[str, Any]], outputs: list[Any]) -> None:
    """Reports that exactness is lost unless vLLM computed the trainer's own prompts."""
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ours, theirs = list(prompt["prompt_token_ids"]), list(output.prompt_token_ids)
        if ours != theirs:
            backend.report_inexact(
                f"prompt {i} has {len(ours)} tokens in the trainer and {len(theirs)} in vLLM; give both the same "
                "processor, with its mm_processor_kwargs"
            )
            return


def _with_seed(params: Any, seed: int) -> Any:
    copy = params.clone()
    copy.seed = seed
    return copy
