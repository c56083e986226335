"""policy_loss in Triton without a GPU: right and invariant under the interpreter, compiled for every GPU family.

The interpreter has to be chosen before Triton's kernels are defined, so its checks run in a process of their own: this
file as a script.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_interpreter() -> None:
    paths = [str(Path(__file__).resolve().parents[2]), *sys.path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "gfx942", "gfx90a"))
def test_compiles_ahead_of_time(target: str) -> None:
    from rlkernel.kernels.triton import policy_loss
    from rlkernel.kernels.triton.aot import SHARED_LIMIT, compile_variant

    for variant in (v for v in policy_loss.AOT if target in v.targets):
        compiled = compile_variant(variant, target)
        assert compiled.shared <= SHARED_LIMIT[target]
        assert compiled.resources()["spill_stores"] <= 4, variant.name
        assert "atom" not in compiled.text, variant.name


def main() -> None:
    import torch
    from test_policy_loss import Batch, assert_matches, check_loss_alone, check_position

    from rlkernel.contract import assert_bitwise
    from rlkernel.kernels import select
    from rlkernel.kernels.policy_loss import LOSS_TYPES

    with select.use("triton"):
        batch = Batch([7, 0, 30, 1], seed=1)
        extras = {"kl_coef": 0.05, "entropy_coef": 0.01, "tis_cap": 1.05, "clip_low": 0.1, "clip_high": 0.3}
        for i, loss_type in enumerate(LOSS_TYPES):
            dual = {} if loss_type in ("cispo", "reinforce") else {"clip_dual": 1.6}
            for level in ("token", "sequence"):
                form = {"loss_type": loss_type, "ratio_level": level, "kl_type": f"k{i % 3 + 1}", **extras, **dual}
                assert_matches(batch, **form, per_token=level == "token", normalizer=9.0 if i % 2 else None)
        assert_matches(Batch([4, 9], seed=2, masked=False, spread=1.0), clip_low=math.inf)
        for level in ("token", "sequence"):
            assert_matches(Batch([1023, 1025], seed=3, spread=0.1), ratio_level=level, kl_coef=0.1)
            check_position(Batch([5, 1100, 0, 17], seed=4), [1, 3, 0], ratio_level=level, kl_coef=0.1, entropy_coef=0.1)
            check_loss_alone([5, 1100, 0, 17], 1, 5, ratio_level=level)

        clean = batch.run(per_token=True, **extras)
        for x in (batch.logp, batch.old_logp, batch.ref_logp, batch.rollout_logp, batch.entropy, batch.per_token):
            x[~batch.mask] = math.nan
        for name, value in batch.run(per_token=True, **extras).items():
            assert_bitwise(value, clean[name], f"{name} with NaN under the mask")
        batch.logp[batch.mask.nonzero()[0]] = math.nan
        assert all(math.isnan(batch.run()[name]) for name in ("loss", "ratio_min", "ratio_max", "drift_max"))
        batch.mask[:] = False
        for normalizer in (None, torch.tensor(0.0)):
            for name, value in batch.run(**extras, normalizer=normalizer).items():
                assert not value.any(), f"{name} is {value} where nothing counts"
        batch = Batch([5, 4], seed=6, masked=False)
        for borders in ([0, 5, 8], [1, 5, 9], [0, 12, 9]):
            batch.cu_seqlens = torch.tensor(borders, dtype=torch.int32)
            assert math.isnan(batch.run()["loss"]), f"cu_seqlens {borders} went unnoticed"


if __name__ == "__main__":
    main()
