"""Variants of `rlkernel/kernels/triton/attention.py` that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from aot import Variant
from rlkernel.kernels.triton.attention import MERGE, PARTIAL, attention_kernel
from rlkernel.kernels.triton.attention_splits import KEY_BLOCK
from rlkernel.kernels.triton.attention_tiles import Tile, forward_tile
from rlkernel.kernels.triton.common import next_power_of_2

AMD = ("gfx942", "gfx90a")


def _variant(name: str, kind: str, tile: Tile, d: int, targets: tuple[str, ...], *, paged: bool = False,
             window: bool = False, mode: int = 0, halves: bool = False, turns: bool = False,
             capacity: bool = False, waits: bool = False, main: bool = True) -> Variant:  # fmt: skip
    part = "fp32" if mode == PARTIAL.value else kind
    types = {
        "q": f"*{kind}:16", "k": f"*{kind}:16", "v": f"*{kind}:16", "cu_q": "*i32:16", "lens": "*i32:16",
        "out": f"*{part}:16", "lse": "*fp32:16", "final_out": f"*{kind}:16", "final_lse": "*fp32:16",
        "T": "i32", "q_stride": "i32:16", "k_stride": "i32:16",
        "v_stride": "i32:16", "COLUMNS": "i32", "MOST": "i32", "PAGES": "i32", "window": "i32",
        "SPLIT": "i32:16", "SPLITS": "i32", "scale_log2e": "fp32",
    }  # fmt: skip
    constants = {
        "HK": 8, "GROUP": 2, "D": d, "KV_HEAD": 2 * d if halves else d, "BLOCK_D": next_power_of_2(d, 16),
        "BLOCK_M": tile.rows, "MODE": mode, "PERSISTENT": turns, "HAS_WINDOW": window, "PAGE": 16 if paged else 0,
        "HAS_CAPACITY": capacity, "CAUSAL": True, "PDL": waits,
    }  # fmt: skip
    tma = not paged and kind != "fp32" and d == next_power_of_2(d) and targets == ("sm_90",)
    branch = kind != "fp32" and targets == ("sm_90",)
    constants |= {"TMA": tma, "BRANCH": branch, "k_box": None, "v_box": None}
    if tma:
        for box in ("k_box", "v_box"):
            del constants[box]
            types[box] = f"tensordesc<{kind}[{KEY_BLOCK.value},{d}]>"
    if paged:
        types["table"] = "*i32:16"
    else:
        constants["table"] = None
    stack = 16 if mode == MERGE.value or turns else 0  # spilled once per split
    return Variant(name, attention_kernel, types, constants, tile.warps, tile.stages, matmul=True, main=main,
                   targets=targets, stack=stack)  # fmt: skip


def _family_variants(family: str, targets: tuple[str, ...]) -> Iterator[Variant]:
    """The variants that a GPU family launches: prefill packed, from pages and over splits, decode from pages."""
    prefill = {d: forward_tile(4096, d, 2, family) for d in (64, 128, 256)}
    decode = {d: forward_tile(2, d, 2, family) for d in (64, 128, 256)}
    fits, hopper = family != "ampere", family == "hopper"
    name = f"attention {family}"
    yield _variant(f"{name} prefill", "bf16", prefill[128], 128, targets, main=fits)
    yield _variant(f"{name} prefill window", "fp16", prefill[128], 128, targets, window=True, main=fits)
    yield _variant(f"{name} prefill splits", "bf16", prefill[128], 128, targets, mode=MERGE.value, main=hopper)
    yield _variant(f"{name} prefill pages", "bf16", prefill[128], 128, targets, paged=True, main=fits)
    yield _variant(f"{name} decode", "bf16", decode[128], 128, targets, paged=True, mode=PARTIAL.value, main=hopper)
    yield _variant(f"{name} prefill d64", "bf16", prefill[64], 64, targets, mode=MERGE.value)
    yield _variant(f"{name} decode d64", "bf16", decode[64], 64, targets, paged=True)
    yield _variant(f"{name} fp32", "fp32", forward_tile(1, 64, 4, family), 64, targets, main=False)
    if hopper:
        side = {"paged": True, "halves": True, "waits": True, "main": False}
        yield _variant(f"{name} decode halves", "bf16", decode[128], 128, targets, mode=PARTIAL.value, **side)
        yield _variant(
            f"{name} decode turns", "bf16", decode[128], 128, targets, mode=PARTIAL.value, turns=True, **side
        )
        yield _variant(f"{name} prefill capacity", "bf16", prefill[128], 128, targets, mode=MERGE.value, capacity=True)
        yield _variant(f"{name} fp32 d128", "fp32", forward_tile(1, 128, 4, family), 128, targets, main=False)
        yield _variant(f"{name} d80", "bf16", forward_tile(64, 80, 2, family), 80, targets, main=False)
        yield _variant(f"{name} prefill d256", "bf16", prefill[256], 256, targets, main=False)
        yield _variant(f"{name} decode d256", "bf16", decode[256], 256, targets, paged=True, main=False)


AOT: tuple[Variant, ...] = (
    *_family_variants("ampere", ("sm_80",)),
    *_family_variants("hopper", ("sm_90",)),
    *_family_variants("blackwell", ("sm_100",)),
    *_family_variants("amd", AMD),
)  # fmt: skip
