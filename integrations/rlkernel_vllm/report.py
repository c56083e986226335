"""What an engine runs: module by module, through a call that its workers answer only where the plugin is at work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """Status of a vLLM engine (`LLM`, or anything with `collective_rpc`)."""
    try:
        answers = call(llm, "rlkernel_status")
    except InactiveError:
        return Status(active=False)
    return Status(**answers[0])


def assert_active(llm: Any) -> Status:
    """Status of an engine that was asked for rlkernel.

    Raises:
        InactiveError: its workers do not run it, as where `VLLM_PLUGINS` names other plugins only.
    """
    found = status(llm)
    if not found.active:
        raise InactiveError(
            f"the engine's workers do not compute with rlkernel. Was {FLAG} set for this engine? Does VLLM_PLUGINS, "
            "where it is set, name rlkernel? Is rlkernel installed in the Python environment of the workers?"
        )
    return found


def call(llm: Any, method: str) -> list[Any]:
    """Answers of all workers to one of our methods.

    Raises:
        InactiveError: they do not have it.
    """
    try:
        answers: list[Any] = llm.collective_rpc(method)
    except Exception as error:  # vLLM wraps what a worker raises in types that differ between executors
        if method in str(error):
            raise InactiveError(
                f"the engine's workers have no method {method}: the plugin is not at work there"
            ) from None
        raise
    return answers


def of_worker(worker: Any) -> dict[str, Any]:
    """Status of a worker as plain data, which every executor can send."""
    import torch
    import vllm

    import rlkernel
    from rlkernel import ops
    from rlkernel_vllm import settings

    asked = settings.read(worker.vllm_config)
    runner = worker.model_runner
    done = runner.get_model().rlkernel
    return {
        "active": True,
        "exact": not done.found,
        "contract": ops.attention_contract(asked.attention),
        "mode": asked.mode,
        "attention": asked.attention,
        "runner": "V2" if hasattr(runner, "prompt_logprobs_worker") else "V1",
        "modules": {**done.modules, "sampler": type(runner.sampler).__name__},
        "findings": [list(finding) for finding in done.found],
        "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__), "rlkernel": rlkernel.__version__},
    }
