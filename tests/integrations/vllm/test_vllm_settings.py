"""Settings of an engine, and answers of its workers, without vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkernel_vllm import compare, fingerprint, fingerprints, settings, status
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hashes_of_shards_add_up(ranks: int) -> None:
    """Rows, columns, two key heads on four ranks, and a vocabulary whose last rank has padding."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    size, heads, vocabulary = -(-30 // ranks), 2, 30
    replicas = max(1, ranks // heads)
    column = SimpleNamespace(gather_output=False, num_kv_head_replicas=replicas)
    weights: dict[str, tuple[torch.Tensor, Any, Any]] = {
        "a.q_proj.weight": (draw(8, 6), column, lambda x, r: x.chunk(ranks)[r]),
        "a.k_proj.bias": (draw(8), column, lambda x, r: x.chunk(ranks // replicas)[r // replicas]),
        "a.o_proj.weight": (draw(3, 8), SimpleNamespace(input_is_parallel=True), lambda x, r: x.chunk(ranks, 1)[r]),
        "a.o_proj.bias": (draw(3), SimpleNamespace(input_is_parallel=True), lambda x, r: x),
        "norm.weight": (draw(5), SimpleNamespace(), lambda x, r: x),
    }
    for name, (whole, module, cut) in weights.items():
        places = [fingerprint._shard_of(name, cut(whole, r), module, r, ranks) for r in range(ranks)]
        hashes = [int(fingerprint._hash(cut(whole, r), places[r])) for r in range(ranks)]
        total = sum(hashes[:: places[0].copies])
        assert fingerprint._text(whole.dtype, places[0].shape, total) == fingerprint.fingerprint(whole), name
        assert len(set(hashes)) == ranks // places[0].copies, name
    table, total = draw(vocabulary, 4), 0
    for r in range(ranks):
        module = SimpleNamespace(
            org_vocab_size=vocabulary, shard_indices=SimpleNamespace(org_vocab_start_index=r * size)
        )
        rows = table[r * size : (r + 1) * size]
        place = fingerprint._shard_of("embed_tokens.weight", rows, module, r, ranks)
        total += int(fingerprint._hash(rows, place))
    assert fingerprint._text(table.dtype, place.shape, total) == fingerprint.fingerprint(table)


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
