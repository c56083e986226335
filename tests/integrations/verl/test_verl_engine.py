"""verl's engines with the flag on 1, 2 and 4 gloo ranks: log-probabilities, updates, LoRA, critic, certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl_side import GPUS, make_model, on_ranks

ON = {"use_rl_kernel_backend": True}
LORA = {"lora_rank": 4, "lora_alpha": 8, "lora": {"merge": True}}
RANKS = [ranks for ranks in (1, 2, 4) if not GPUS or ranks <= GPUS]
NAMES = ("untied", "tied", "lora", "critic", "stock")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """{ranks: {scenario: result of each rank}}."""
    folder = tmp_path_factory.mktemp("engine")
    models = {"untied": False, "tied": True}
    for name, tied in models.items():
        make_model(folder / name, tied=tied)
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 80}
    untied = {"model": str(folder / "untied"), "settings": ON}
    scenarios = {
        "untied": untied,
        "tied": {
            "model": str(folder / "tied"),
            "settings": {**ON, "enable_gradient_checkpointing": True, "use_remove_padding": False},
            "batch": {**dynamic, "use_remove_padding": False},
            "resume": True,
        },
        "lora": {**untied, "settings": {**ON, **LORA}},
        "critic": {**untied, "kind": "value_model"},
        "stock": {"model": str(folder / "untied"), "updates": 2},
        "hsdp": {**untied, "fsdp_size": 2},
    }
    out = {}
    for ranks in RANKS:
        names = NAMES if ranks < 4 else (*NAMES, "hsdp")
        results = on_ranks(ranks, folder, [scenarios[name] for name in names])
        out[ranks] = {name: [rank[i] for rank in results] for i, name in enumerate(names)}
    return out


def merged(results: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Values of all samples before the first update, from all ranks."""
    names = results[0]["before"]
    return {name: {k: v for rank in results for k, v in rank["before"][name].items()} for name in names}


@pytest.mark.parametrize("name", ["untied", "tied", "lora", "critic"])
def test_one_update_on_any_number_of_ranks(found: Any, name: str) -> None:
    """Micro-batches, gradient checkpointing, dynamic batches and ranks change no bit of values, norms and weights."""
    expected = "ExactCritic" if name == "critic" else "ExactEngine"
    results = [result for ranks in RANKS for result in found[ranks][name]]
    assert {result["engine"] for result in results} == {expected}
    assert all(not any(result["micro_batches"]) for result in results)
    assert len({result["weights"] for result in results}) == 1
    assert len({tuple(result["norms"]) for result in results}) == 1
    values = [merged(found[ranks][name]) for ranks in RANKS]
    assert all(value == values[0] for value in values)


def test_resume(found: Any) -> None:
    assert all(result["resumed"] for ranks in RANKS for result in found[ranks]["tied"])


@pytest.mark.skipif(4 not in RANKS, reason="needs four GPUs")
def test_hsdp_is_the_same(found: Any) -> None:
    assert {r["weights"] for r in found[4]["hsdp"]} == {r["weights"] for r in found[1]["untied"]}


def test_stock_engine_is_not(found: Any) -> None:
    results = [found[ranks]["stock"][0] for ranks in RANKS]
    assert {result["engine"] for result in results} == {"FSDPEngineWithLMHead"}
    assert len({result["weights"] for result in results}) == len(RANKS)
    assert any(results[0]["micro_batches"])


@pytest.mark.parametrize("name", ["untied", "tied", "lora"])
def test_certificate(found: Any, name: str) -> None:
    """The delivered weights give a plain model the trainer's bits; one bit that differs stops every rank."""
    for ranks in RANKS:
        for rank, result in enumerate(found[ranks][name]):
            assert result["left_out"] == []
            assert result["certificate"]["rlkernel/exact_frac"] == [1.0]
            assert result["certificate"]["rlkernel/tokens"][0] > 200
            assert result["one_bit"].startswith("1 of ")
            assert ("completion 0, token 0" in result["one_bit"]) == (rank == 0)
            assert not result["after_an_update"]


def test_norm_is_that_of_the_same_loss_in_stock_verl(tmp_path: Path) -> None:
    """A model whose vocabulary is the tokenizer's, so that both have the same distribution."""
    make_model(tmp_path / "model", vocab_size=24)
    one = {"model": str(tmp_path / "model"), "updates": 1}
    ((ours, stock),) = on_ranks(1, tmp_path, [{**one, "settings": ON}, one])
    assert ours["norms"] == pytest.approx(stock["norms"], rel=0.02)
