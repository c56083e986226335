"""policy_loss in Triton without a GPU: accurate and invariant in the interpreter, compiled for every GPU family."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":
    from aot import SHARED_LIMIT, compile_variant, variants
    from triton_interpreter import run

    def test_in_the_interpreter() -> None:
        run(__file__)

    @pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "gfx942", "gfx90a"))
    def test_compiles_ahead_of_time(target: str) -> None:
        for variant in (v for v in variants("policy_loss") if target in v.targets):
            compiled = compile_variant(variant, target)
            assert compiled.shared <= SHARED_LIMIT[target]
            assert compiled.resources()["spill_stores"] <= 4, variant.name
            assert "atom" not in compiled.text, variant.name

else:
    from test_policy_loss import Batch, assert_matches, check_loss_alone, check_position

    from rlkernel.contract import assert_accurate, assert_bitwise
    from rlkernel.kernels import select
    from rlkernel.kernels.policy_loss import LOSS_TYPES

    EXTRAS = {"kl_coef": 0.05, "entropy_coef": 0.01, "tis_cap": 1.05, "clip_low": 0.1, "clip_high": 0.3}

    @pytest.fixture(autouse=True)
    def in_triton() -> Iterator[None]:
        with select.use("triton"):
            yield

    @pytest.mark.parametrize("i,loss_type", list(enumerate(LOSS_TYPES)))
    def test_accuracy(i: int, loss_type: str) -> None:
        batch = Batch([7, 0, 30, 1], seed=1)
        dual = {} if loss_type in ("cispo", "reinforce") else {"clip_dual": 1.6}
        for level in ("token", "sequence"):
            form = {"loss_type": loss_type, "ratio_level": level, "kl_type": f"k{i % 3 + 1}", **EXTRAS, **dual}
            assert_matches(batch, **form, per_token=level == "token", normalizer=9.0 if i % 2 else None)

    def test_nothing_is_clipped() -> None:
        assert_matches(Batch([4, 9], seed=2, masked=False, spread=1.0), clip_low=math.inf)

    @pytest.mark.parametrize("level", ("token", "sequence"))
    def test_without_optional_vectors(level: str) -> None:
        """A tensor normalizer divides on the device."""
        batch = Batch([70, 0, 33, 1], seed=7)
        bare = dict.fromkeys(("ref_logp", "entropy", "rollout_logp"))
        for normalizer in (None, torch.tensor(9.0)):
            found = batch.run(**bare, ratio_level=level, normalizer=normalizer)
            with select.use("reference"):
                wanted = batch.run(**bare, ratio_level=level, normalizer=normalizer)
            for name, value in found.items():
                assert_accurate(value.float(), wanted[name].float(), None, name)

    @pytest.mark.parametrize("level", ("token", "sequence"))
    def test_across_segments(level: str) -> None:
        assert_matches(Batch([1023, 1025], seed=3, spread=0.1), ratio_level=level, kl_coef=0.1)
        check_position(Batch([5, 1100, 0, 17], seed=4), [1, 3, 0], ratio_level=level, kl_coef=0.1, entropy_coef=0.1)
        check_loss_alone([5, 1100, 0, 17], 1, 5, ratio_level=level)

    def test_masked_counted_and_nothing_counted() -> None:
        batch = Batch([7, 0, 30, 1], seed=1)
        clean = batch.run(per_token=True, **EXTRAS)
        for x in (batch.logp, batch.old_logp, batch.ref_logp, batch.rollout_logp, batch.entropy, batch.per_token):
            x[~batch.mask] = math.nan
        for name, value in batch.run(per_token=True, **EXTRAS).items():
            assert_bitwise(value, clean[name], f"{name} with NaN under the mask")
        batch.logp[batch.mask.nonzero()[0]] = math.nan
        assert all(math.isnan(batch.run()[name]) for name in ("loss", "ratio_min", "ratio_max", "drift_max"))
        batch.mask[:] = False
        for normalizer in (None, torch.tensor(0.0)):
            for name, value in batch.run(**EXTRAS, normalizer=normalizer).items():
                assert not value.any(), f"{name} is {value} where nothing counts"

    def test_invalid_cu_seqlens() -> None:
        batch = Batch([5, 4], seed=6, masked=False)
        for borders in ([0, 5, 8], [1, 5, 9], [0, 12, 9]):
            batch.cu_seqlens = torch.tensor(borders, dtype=torch.int32)
            assert math.isnan(batch.run()["loss"]), f"cu_seqlens {borders} went unnoticed"
