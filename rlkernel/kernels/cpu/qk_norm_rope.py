"""qk_norm_rope on the CPU: the C++ kernel of rms_norm, then that of rope."""

from __future__ import annotations

import functools

from rlkernel.kernels.cpu.rms_norm import rms_norm
from rlkernel.kernels.cpu.rope import rope
from rlkernel.kernels.reference.qk_norm_rope import norm_then_rope

qk_norm_rope = functools.partial(norm_then_rope, rms_norm, rope)
