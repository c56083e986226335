"""Status of an engine, module by module, from a method that its workers have only if the plugin is active."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from rlkernel_vllm import settings
from rlkernel_vllm.settings import FLAG


class InactiveError(RuntimeError):
    """An engine requested rlkernel, and its workers do not compute with it."""


@dataclass(frozen=True)
class Status:
    """What an engine's workers report.

    Attributes:
        active: whether they compute with rlkernel.
        exact: whether there are no findings (always so in strict mode).
        contract: contract id of the computation.
        mode, attention, tp_leaves: the settings.
        tensor_parallel_size: number of ranks.
        runner: vLLM's model runner, "V1" or "V2".
        modules: module name -> what computes it; "stock": vLLM itself.
        findings: [setting or module, reason] of what cannot be exact; "audit" mode admits it.
        versions: of vLLM, torch and rlkernel.
    """

    active: bool
    exact: bool = False
    contract: str = ""
    mode: str = ""
    attention: str = ""
    tp_leaves: int = 1
    tensor_parallel_size: int = 1
    runner: str = ""
    modules: dict[str, str] = field(default_factory=dict)
    findings: list[list[str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.active:
            return "rlkernel: not active"
        counts: dict[str, int] = {}
        for by in self.modules.values():
            counts[by] = counts.get(by, 0) + 1
        lines = [
            f"rlkernel: {'exact' if self.exact else 'NOT EXACT'}, contract {self.contract}, runner {self.runner}, "
            f"tensor_parallel_size {self.tensor_parallel_size}, tp_leaves {self.tp_leaves}",
            *(f"  {count:4d} modules by {by}" for by, count in sorted(counts.items())),
            *(f"  not exact: {name}: {reason}" for name, reason in self.findings),
        ]
        return "\n".join(lines)


def status(llm: Any) -> Status:
    """Status of a vLLM engine, with the findings of all its workers.

    Args:
        llm: an `LLM`, anything with a synchronous `collective_rpc`, or the answer of an asynchronous engine:
            `status(await engine.collective_rpc("rlkernel_status"))`.

    Raises:
        TypeError: llm is an asynchronous engine (the message says what to await), or not an engine.
    """
    try:
        answers = llm if isinstance(llm, list) else call(llm, "rlkernel_status")
    except InactiveError:
        return Status(active=False)
    found = dict.fromkeys(tuple(finding) for answer in answers for finding in answer["findings"])
    return Status(
        **{**answers[0], "exact": all(answer["exact"] for answer in answers), "findings": list(map(list, found))}
    )


def assert_active(llm: Any) -> Status:
    """Status of an engine that requested rlkernel.

    Raises:
        InactiveError: its workers do not compute with rlkernel, for example because `VLLM_PLUGINS` names other plugins.
        TypeError: as in `status`.
    """
    found = status(llm)
    if not found.active:
        if settings.hook_error:
            raise InactiveError(f"the plugin does not fit this vLLM: {settings.hook_error}")
        raise InactiveError(
            f"the engine's workers do not compute with rlkernel. Was {FLAG} set for this engine? If VLLM_PLUGINS is "
            "set, does it name rlkernel? Is rlkernel installed in the Python environment of the workers?"
        )
    return found


def call(llm: Any, method: str) -> list[Any]:
    """Answers of all workers to one of the plugin's methods.

    Raises:
        InactiveError: they do not have the method.
        TypeError: llm answers asynchronously, or is not an engine.
    """
    if not hasattr(llm, "collective_rpc"):
        raise TypeError(
            f"a {type(llm).__name__} is not an engine of vLLM; expected an LLM, or the list of its workers' answers"
        )
    try:
        answers: Any = llm.collective_rpc(method)
    except Exception as error:  # executors wrap a worker's error in different types
        if method in str(error):
            raise InactiveError(f"the engine's workers have no method {method}: the plugin is inactive") from None
        raise
    if inspect.isawaitable(answers):
        if inspect.iscoroutine(answers):
            answers.close()
        use = "call status(answers)" if method == "rlkernel_status" else "use answers[0]"
        raise TypeError(
            f"{type(llm).__name__} answers asynchronously: answers = await engine.collective_rpc({method!r}), "
            f"then {use}"
        )
    return answers


def of_worker(worker: Any) -> dict[str, Any]:
    """Status of a worker as plain data, which every executor can serialize."""
    import torch
    import vllm

    import rlkernel
    from rlkernel import ops

    requested = settings.read(worker.vllm_config)
    runner = worker.model_runner
    model = runner.get_model()
    done = model.rlkernel
    variants = {getattr(getattr(module, "impl", None), "rlkernel_variant", None) for module in model.modules()} - {None}
    variant = variants.pop() if len(variants) == 1 else "split"  # in audit mode not always the requested variant
    return {
        "active": True,
        "exact": not done.findings,
        "contract": ops.attention_contract(variant),
        "mode": requested.mode,
        "attention": variant,
        "tp_leaves": requested.tp_leaves,
        "tensor_parallel_size": worker.vllm_config.parallel_config.tensor_parallel_size,
        "runner": "V2" if hasattr(runner, "prompt_logprobs_worker") else "V1",
        "modules": {**done.modules, "sampler": type(runner.sampler).__name__},
        "findings": [list(finding) for finding in done.findings],
        "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__), "rlkernel": rlkernel.__version__},
    }
