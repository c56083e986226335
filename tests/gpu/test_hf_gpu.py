"""On CUDA, transformers models with `rlkernel_transformers.apply` have the bits of rlkernel.models, gradients included,
at the width of Qwen3-0.6B in bf16; padding, cache and packing change none.

Control: log-probabilities of the unchanged model's generate differ from those of its own forward.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkernel import ops
from rlkernel.contract import compare_bitwise
from rlkernel.models import Decoder, PackedBatch
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import from_hf

sys.path.append(str(Path(__file__).parents[2] / "integrations"))  # where the package is not installed
transformers = pytest.importorskip("transformers", minversion="5.0")
rt = pytest.importorskip("rlkernel_transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WIDTH = "model of Qwen3-0.6B's width, bfloat16"
LENGTHS = [700, 33, 512, 1024, 1, 257]


@pytest.fixture(scope="module")
def plain() -> Any:
    """The transformers model: two layers of Qwen3-0.6B's shape, random weights, bf16."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config)
        for p in model.parameters():
            if p.dim() == 1:
                p.data.add_(0.1 * torch.randn_like(p))
    return model.to(torch.bfloat16).eval()


@pytest.fixture
def model(plain: Any) -> Iterator[Any]:
    yield rt.apply(copy.deepcopy(plain)).train()
    torch.cuda.empty_cache()


def decoder_of(model: Any) -> Decoder:
    """Our decoder with the weights of a transformers model."""
    with torch.device("cuda"):
        decoder = Decoder(from_hf(model.config.to_dict())).to(torch.bfloat16)
    weights, own = dict(model.named_parameters()), dict(decoder.named_parameters())
    with torch.no_grad():
        for part in hf_layout(decoder.config):
            own[part.parameter].narrow(0, part.start, part.rows).copy_(weights[part.name])
    return decoder


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 151936, (n,), generator=generator) for n in LENGTHS]


def padded(sequences: list[torch.Tensor], left: bool = True, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences)) + extra
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(sequences):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids.cuda(), mask.cuda()


def next_tokens(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values[(mask & torch.nn.functional.pad(mask[:, 1:], (0, 1))).bool()]


def test_hf_equals_our_decoder(model: Any, record: Callable[..., None], compat: Any) -> None:
    """Log-probabilities, entropies and every gradient."""
    decoder, sequences = decoder_of(model), rows()
    ids, mask = padded(sequences)
    out = rt.token_logprobs(model, ids, mask)
    hidden = decoder(PackedBatch.from_sequences(sequences, "cuda"))
    inner = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS]).cuda()
    ours = decoder.logprob(hidden[inner], torch.cat([row[1:] for row in sequences]).cuda())
    (out.logp.sum() + 0.1 * out.entropy.sum()).backward()
    (ours.logp.sum() + 0.1 * ours.entropy.sum()).backward()
    report = compare_bitwise(next_tokens(out.logp.detach(), mask), ours.logp.detach())
    assert compare_bitwise(next_tokens(out.entropy.detach(), mask), ours.entropy.detach()).mismatches == 0
    found = {name: p.grad for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in decoder.named_parameters()}
    elements = differing = 0
    for part in hf_layout(decoder.config):
        own = gradients[part.parameter].narrow(0, part.start, part.rows)
        assert bool(own.any()), part.name
        differing += compare_bitwise(found[part.name], own).mismatches
        elements += own.numel()
    record(
        cases=len(LENGTHS),
        tokens=report.elements,
        elements=elements,
        mismatches=report.mismatches + differing,
    )
    assert report.mismatches == 0 and differing == 0
    compat.compared("transformers", f"{WIDTH}: log-probabilities", 0, report.elements)
    compat.compared("transformers", f"{WIDTH}: gradients", 0, elements)


@torch.no_grad()
def test_hf_padding_packing_and_micro_batches(model: Any, record: Callable[..., None], compat: Any) -> None:
    sequences = rows(1)
    ids, mask = padded(sequences)
    expected = next_tokens(rt.token_logprobs(model, ids, mask).logp, mask)
    flat, cu, positions = (t.cuda() for t in ops.pack(sequences))
    inner = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS]).cuda()
    right, wide = padded(sequences, left=False), padded(sequences, extra=77)
    alone = [rt.token_logprobs(model, row[None].cuda()).logp[0, :-1] for row in sequences]
    borders = {"cu_seq_lens_q": cu, "max_length_q": max(LENGTHS)}
    found = {
        "right": next_tokens(rt.token_logprobs(model, *right).logp, right[1]),
        "wider": next_tokens(rt.token_logprobs(model, *wide).logp, wide[1]),
        "packed": rt.token_logprobs(model, flat[None], **borders).logp[0, inner],
        "positions": rt.token_logprobs(model, flat[None], position_ids=positions[None]).logp[0, inner],
        "alone": torch.cat(alone),
        "logits": ops.logprob(
            model(ids, attention_mask=mask).logits[:, :-1][(mask[:, 1:] & mask[:, :-1]).bool()],
            torch.cat([row[1:] for row in sequences]).cuda(),
        ).logp,
    }
    mismatches = {name: compare_bitwise(values, expected).mismatches for name, values in found.items()}
    record(cases=len(found), tokens=expected.numel() * len(found), mismatches=sum(mismatches.values()))
    assert not any(mismatches.values()), mismatches
    features = {"right": "padding on either side", "packed": "packed rows", "positions": "packed rows"}
    for name, feature in features.items():
        compat.compared("transformers", feature, 0, found[name].numel())


def generated(model: Any, prompts: torch.Tensor, mask: torch.Tensor, new: int) -> tuple[torch.Tensor, ...]:
    out = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, prompts.shape[1] :]
    return torch.stack(out.logits, 1), tokens, out.sequences, torch.cat((mask, torch.ones_like(tokens)), 1)


@torch.no_grad()
def test_hf_generate_equals_training_forward(model: Any, record: Callable[..., None], compat: Any) -> None:
    prompts, mask = padded(rows(2))
    logits, tokens, sequences, whole = generated(model.eval(), prompts, mask, 32)
    rolled = ops.logprob(logits.flatten(0, 1), tokens.flatten()).logp
    scored = rt.token_logprobs(model, sequences, whole).logp[:, prompts.shape[1] - 1 : -1].flatten()
    report = compare_bitwise(rolled, scored)
    record(cases=len(LENGTHS), tokens=report.elements, mismatches=report.mismatches)
    assert report.mismatches == 0
    compat.compared("transformers", "generate, default cache", 0, report.elements)


@torch.no_grad()
def test_hf_control_stock_differs(plain: Any, record: Callable[..., None], compat: Any) -> None:
    prompts, mask = padded(rows(2))
    logits, tokens, sequences, whole = generated(plain, prompts, mask, 32)
    positions = (whole.cumsum(1) - 1).clamp_min(0)
    again = plain(sequences, attention_mask=whole, position_ids=positions).logits[:, prompts.shape[1] - 1 : -1]
    rolled, scored = (z.float().log_softmax(-1).gather(-1, tokens[..., None]).flatten() for z in (logits, again))
    report = compare_bitwise(rolled, scored)
    record(tokens=report.elements, mismatches=report.mismatches, max_abs_diff=report.max_abs_diff, backend="stock")
    assert report.mismatches > 0
    compat.compared(
        "transformers", "control: stock generate against its own forward", report.mismatches, report.elements
    )


def test_hf_synchronizes_once_or_never(model: Any) -> None:
    """Padded rows, or packing by position ids: one synchronization per forward. With cu_seq_lens: none at all."""
    sequences = rows(3)
    ids, mask = padded(sequences)
    flat, cu, positions = (t.cuda() for t in ops.pack(sequences))
    borders = {"cu_seq_lens_q": cu, "max_length_q": max(LENGTHS)}
    calls: list[tuple[int, Callable[[], Any]]] = [
        (1, lambda: rt.token_logprobs(model, ids, mask)),
        (1, lambda: rt.token_logprobs(model, flat[None], position_ids=positions[None])),
        (0, lambda: rt.token_logprobs(model, flat[None], **borders)),
        (0, lambda: rt.token_logprobs(model, flat[None], rows=torch.arange(5, device="cuda"), **borders)),
    ]
    for allowed, call in calls:
        for _ in range(2):
            call().logp.sum().backward()
            torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call().logp.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in seen if "synchronizing" in str(w.message)]
        assert len(waits) <= allowed, [f"{w.filename}:{w.lineno}" for w in waits]
