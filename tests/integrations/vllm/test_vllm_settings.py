"""Settings of an engine, and answers of its workers, without vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlkernel_vllm import compare, fingerprints, settings, status
from rlkernel_vllm.settings import ATTENTION, FLAG, LEAVES, MODE, Settings

ANSWER: dict[str, Any] = {"active": True, "exact": True, "contract": "rlk-2", "findings": []}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in settings.ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)


def test_arguments_configuration_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.of({}) == Settings()
    monkeypatch.setenv("RLKERNEL_VLLM", "1")
    monkeypatch.setenv("RLKERNEL_VLLM_MODE", "audit")
    monkeypatch.setenv("RLKERNEL_VLLM_ATTENTION", "fa3")
    nothing = settings.merged(None, {FLAG: None, MODE: None, ATTENTION: None})
    assert nothing == {} and settings.of(nothing) == Settings(True, "audit", "fa3")
    assert not settings.of(settings.merged(None, {FLAG: False})).enabled
    assert settings.of(settings.merged({MODE: "strict"}, {FLAG: "on"})) == Settings(True, "strict", "fa3")
    monkeypatch.setenv("RLKERNEL_VLLM_TP_LEAVES", "4")
    assert settings.of({}).tp_leaves == 4 and settings.of({LEAVES: 8}).tp_leaves == 8
    with pytest.raises(ValueError, match="tp_leaves is 3; expected '1' or '2' or '4' or '8'"):
        settings.of({LEAVES: 3})
    assert settings.merged({MODE: "audit"}, {MODE: "audit"}) == {MODE: "audit"}
    with pytest.raises(ValueError, match="rl_kernel_mode is 'strict' as an argument and 'audit' in additional_config"):
        settings.merged({MODE: "audit"}, {MODE: "strict"})


@pytest.mark.parametrize(
    "variable,value", [("RLKERNEL_VLLM", "2"), ("RLKERNEL_VLLM_MODE", "loose"), ("RLKERNEL_VLLM_ATTENTION", "fa4")]
)
def test_a_variable_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^environment variable {variable} is '{value}'; expected"):
        settings.of({})


@pytest.mark.parametrize(
    "key",
    ["use_rl_kernel_backnd", "rl_kernel_modes", "use_rlkernel_backend", "use-rl-kernel-backend", "rlkernel", "tp_leaf"],
)
def test_a_mistyped_key_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match=f"additional_config has {key}; rlkernel's keys are"):
        settings.of({key: True})
    with pytest.raises(TypeError, match="additional_config is a str; expected a dict"):
        settings.merged('{"use_rl_kernel_backend": true}', {})  # type: ignore[arg-type]
    assert settings.of({"rlkernel_drift": "full", "another": 1}) == Settings()


def test_answers_of_several_workers() -> None:
    other = {**ANSWER, "exact": False, "findings": [["a", "b"]]}
    found = status([ANSWER, other, other])
    assert found.active and not found.exact and found.findings == [["a", "b"]]

    class Engine:
        def collective_rpc(self, method: str) -> list[dict[str, str]]:
            return [{"w": "1"}, {"w": self.second}]

        second = "1"

    engine = Engine()
    assert compare(fingerprints(engine), {"w": "1"}) == {}
    engine.second = "2"
    with pytest.raises(RuntimeError, match="workers hold different weights: w"):
        fingerprints(engine)


def test_a_worker_confirms_the_trainers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkernel_vllm import fingerprint

    monkeypatch.setattr(fingerprint, "of_worker", lambda worker: {"w": "1", "v": "2"})
    assert fingerprint.confirm(None, {"w": "1", "v": "2"})
    with pytest.raises(RuntimeError, match=r"rlkernel: 1 of 2 weights in vLLM .* v: trainer 3, vLLM 2"):
        fingerprint.confirm(None, {"w": "1", "v": "3"})


def test_other_types_than_engines_are_named() -> None:
    with pytest.raises(TypeError, match="a str is not an engine of vLLM"):
        status("Qwen/Qwen3-0.6B")
    for wrong in ("Qwen/Qwen3-0.6B", 7):
        with pytest.raises(TypeError, match=f"fingerprints takes an engine, .* found a {type(wrong).__name__}"):
            fingerprints(wrong)


def test_an_asynchronous_engine() -> None:
    class AsyncLLM:
        async def collective_rpc(self, method: str) -> list[Any]:
            return [ANSWER]

    engine = AsyncLLM()
    with pytest.raises(TypeError, match=r"AsyncLLM .* await engine.collective_rpc\('rlkernel_status'\)"):
        status(engine)
    with pytest.raises(TypeError, match=r"await engine.collective_rpc\('rlkernel_fingerprints'\)"):
        fingerprints(engine)
    assert status(asyncio.run(engine.collective_rpc("rlkernel_status"))).exact
