"""What an engine runs: module by module, through a call that its workers answer only where the plugin is at work."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from rlkernel_vllm import settings
from rlkernel_vllm.settings import FLAG


class InactiveError(RuntimeError):
    """An engine was asked for rlkernel, and its workers do not run it."""


@dataclass(frozen=True)
class Status:
    """What an engine's workers report.

    Attributes:
        active: whether they compute with rlkernel.
        exact: whether nothing was found that cannot be exact (always so in strict mode).
        contract: contract id of the numbers.
        mode, attention: the settings.
        runner: vLLM's model runner, "V1" or "V2".
        modules: module name -> what computes it; "stock": vLLM itself.
        findings: [setting or module, reason] of what cannot be exact; "audit" mode lets it through.
        versions: of vLLM, torch and rlkernel.
    """

    active: bool
    exact: bool = False
    contract: str = ""
    mode: str = ""
    attention: str = ""
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
            f"rlkernel: {'exact' if self.exact else 'NOT EXACT'}, contract {self.contract}, runner {self.runner}",
            *(f"  {count:4d} modules by {by}" for by, count in sorted(counts.items())),
            *(f"  not exact: {name}: {reason}" for name, reason in self.findings),
        ]
        return "\n".join(lines)


def status(llm: Any) -> Status:
    """Status of a vLLM engine: `LLM`, anything with a `collective_rpc` that waits, or what an asynchronous one answered
    (`status(await engine.collective_rpc("rlkernel_status"))`). Of several workers, with what any of them found.

    Raises:
        TypeError: an engine that answers asynchronously (the message says what to await), or no engine.
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
    """Status of an engine that was asked for rlkernel.

    Raises:
        InactiveError: its workers do not run it, as where `VLLM_PLUGINS` names other plugins only.
        TypeError: as in `status`.
    """
    found = status(llm)
    if not found.active:
        if settings.failed:
            raise InactiveError(f"the plugin does not fit this vLLM: {settings.failed}")
        raise InactiveError(
            f"the engine's workers do not compute with rlkernel. Was {FLAG} set for this engine? Does VLLM_PLUGINS, "
            "where it is set, name rlkernel? Is rlkernel installed in the Python environment of the workers?"
        )
    return found


def call(llm: Any, method: str) -> list[Any]:
    """Answers of all workers to one of our methods.

    Raises:
        InactiveError: they do not have it.
        TypeError: the engine answers asynchronously, or is none.
    """
    if not hasattr(llm, "collective_rpc"):
        raise TypeError(f"a {type(llm).__name__} is no engine of vLLM; expected an LLM, or the list of its answers")
    try:
        answers: Any = llm.collective_rpc(method)
    except Exception as error:  # vLLM wraps what a worker raises in types that differ between executors
        if method in str(error):
            raise InactiveError(
                f"the engine's workers have no method {method}: the plugin is not at work there"
            ) from None
        raise
    if inspect.isawaitable(answers):
        if inspect.iscoroutine(answers):
            answers.close()
        use = "status(answers)" if method == "rlkernel_status" else "answers[0] has a worker's"
        raise TypeError(
            f"{type(llm).__name__} answers asynchronously: answers = await engine.collective_rpc({method!r}), "
            f"then {use}"
        )
    return answers


def of_worker(worker: Any) -> dict[str, Any]:
    """Status of a worker as plain data, which every executor can send."""
    import torch
    import vllm

    import rlkernel
    from rlkernel import ops

    asked = settings.read(worker.vllm_config)
    runner = worker.model_runner
    model = runner.get_model()
    done = model.rlkernel
    variants = {getattr(getattr(module, "impl", None), "rlkernel_variant", None) for module in model.modules()} - {None}
    variant = variants.pop() if len(variants) == 1 else "split"  # what runs, where audit let another wish through
    return {
        "active": True,
        "exact": not done.found,
        "contract": ops.attention_contract(variant),
        "mode": asked.mode,
        "attention": variant,
        "runner": "V2" if hasattr(runner, "prompt_logprobs_worker") else "V1",
        "modules": {**done.modules, "sampler": type(runner.sampler).__name__},
        "findings": [list(finding) for finding in done.found],
        "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__), "rlkernel": rlkernel.__version__},
    }
