"""The orders of contract rlk-2 as data, and the constants that the kernels take from them.

Every reduction has one canonical order, which depends only on the weight's shape and the element's absolute position.
The id changes when any bit changes. CPU and GPU follow the orders in their own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT_ID = "rlk-2"

K_GROUP = 16
"""linear: products per step of the fp32 chain on tensor cores; one on a CPU."""
VOCAB_TILE = 128
"""log-probability: vocabulary entries per tile of the log-sum-exp."""
WGRAD_TOKENS = 8192
"""linear, rms_norm, GPU: tokens per chunk of a weight gradient; chunks are added in fp32, ascending."""
SUM_TOKENS = 256
"""GPU: tokens per chunk of the gradient of a bias; chunks are added in fp32, ascending."""
DGRAD_WHOLE = 32768
"""linear, GPU: largest N over which an input gradient is one chain."""
DGRAD_CHUNK = 152 * VOCAB_TILE
"""linear, GPU: chunks of a larger N, each a chain from +0, added in fp32, ascending. Qwen3's head has eight: enough to
occupy a GPU with few tokens, and few enough that adding them costs little with many tokens."""
LOGPROB_DGRAD_CHUNK = 64 * VOCAB_TILE
"""linear_logprob, GPU: chunks of V in the input gradient, each a chain from +0, added in fp32, ascending. The gradient
of a chunk's logits takes 128 MiB in bf16 for 8192 tokens."""
EMBEDDING_WINDOW = 256
"""embedding, GPU: tokens per window of a gradient row's sum; the windows of an id are added in fp32, ascending."""
LANES = 16
"""CPU row sums: element j goes to lane j mod 16, lanes are folded in halves (8, 4, 2, 1)."""
ATTENTION_BLOCK = 64
"""attention: keys per online-softmax block, from each sequence's first key."""
ATTENTION_SPLIT = 2048
"""attention: keys per split; splits are normalised and merged ascending by their log-sum-exp."""
FIXED_POINT_BITS = 23
"""log-probability: fraction bits of the order-free integer sums inside a vocabulary tile."""
ROW_POINT_BITS = 40
"""log-probability: fraction bits of the order-free integer sums over a row's vocabulary tiles."""
MAX_VOCAB = 2**23 - 1
"""log-probability: largest vocabulary, for which the sums over its tiles fit in 63 bits."""
SEGMENT = 1024
"""losses and statistics: elements per segment of a two-pass sum. grad_norm: lanes of a sum."""
NORM_SEGMENT = 16384
"""grad_norm: elements of a tensor per partial sum, from its first element."""


@dataclass(frozen=True)
class Order:
    """Canonical order of one op: what is fixed, and what an implementation may choose without changing a bit."""

    op: str
    fixed: str
    free: str


ORDERS: dict[str, Order] = {
    order.op: order
    for order in (
        Order(
            "embedding",
            "forward: a copy. Backward: per token id, fp32 sum over its occurrences in ascending packed order (GPU: in "
            f"windows of {EMBEDDING_WINDOW} tokens, whose sums are added ascending)",
            "parallelism over ids and channels",
        ),
        Order(
            "linear",
            "K in P equal chunks; inside a chunk one fp32 chain from +0, k ascending (groups of 16 on tensor cores, "
            "single fma on CPU); chunks in a balanced binary tree in fp32; bias in fp32; one rounding. Input gradient: "
            f"the same over N; on a GPU, above N = {DGRAD_WHOLE}, chunks of {DGRAD_CHUNK} added ascending. Weight "
            f"gradient: fp32, tokens in packed order (GPU: chunks of {WGRAD_TOKENS}, a chain each, added ascending), "
            "added to the values of main_grad",
            "tile shape, batch, row position, split over CTAs, threads, fused weights",
        ),
        Order(
            "rms_norm",
            "r = round(x + residual); fp32 sum of squares over a tree fixed by C; "
            "round(round(r * rstd) * weight). Weight gradient: tokens ascending (GPU: a tree fixed by C over each "
            f"{WGRAD_TOKENS} rows, added ascending)",
            "rows per program, threads",
        ),
        Order(
            "rope",
            "fp32 table by absolute position; fma(x1, cos, -(x2 * sin)) and fma(x2, cos, x1 * sin); one rounding",
            "everything else",
        ),
        Order(
            "swiglu",
            "round(round(silu(gate)) * up) with silu(x) = x / (1 + exp(-x)) in fp32",
            "everything else",
        ),
        Order(
            "attention",
            f"keys from each sequence's first one in blocks of {ATTENTION_BLOCK}; online softmax in base 2, always "
            f"rescaling; P rounded to the value dtype; splits of {ATTENTION_SPLIT} keys normalised and merged "
            "ascending by LSE. Backward: P and dS rounded to the operand dtype; dQ one chain over the keys, dK and dV "
            "one over the queries (heads of the group inside), ascending, each owned by one program, no atomics",
            "query tile, packing, page size, number of CTAs, chunked prefill",
        ),
        Order(
            "logprob",
            f"fp32 logits times fp32 1/T; vocabulary tiles of {VOCAB_TILE}: exact maximum, order-free sums of "
            f"exp2 terms in fixed point with {FIXED_POINT_BITS} fraction bits; tiles weighted in fp32 and added in "
            f"fixed point with {ROW_POINT_BITS}, in any order",
            "tile shape over tokens, order inside a vocabulary tile and over tiles, fusion with the logits' GEMM",
        ),
        Order(
            "sample",
            "Gumbel-max; noise keyed by request seed, position and token id; lowest id wins ties",
            "row in the batch, tiling of the vocabulary",
        ),
        Order(
            "policy_loss",
            f"elementwise fp32; sums per sequence and per batch over segments of {SEGMENT} tokens from the first "
            "token of each (GPU: inside one 128 lanes, tokens ascending, folded in halves; segments added ascending), "
            "two passes, no atomics",
            "number of programs",
        ),
        Order(
            "group_advantages",
            "elementwise fp32 on differences to the group's first reward; 16-lane row sums; the same bits on every "
            "device",
            "other groups (mode batch excepted)",
        ),
        Order(
            "gae",
            "from each sequence's last token to its first, fp32: delta = fma(gamma, V', r) - V, "
            "A = fma(gamma lambda, A', delta), return = A + V, with gamma lambda rounded once from fp64 and V', A' of "
            "the next token, +0 after the last; the same bits on every device",
            "other sequences, programs, threads",
        ),
        Order(
            "adamw",
            "elementwise fp32 with explicit fma, coefficients of a step from fp64, one rounding into the parameter. "
            f"Gradient norm: fp64 sums of squares over segments of {NORM_SEGMENT} elements of a tensor, over its "
            f"segments, over the tensors, each in {SEGMENT} lanes, ascending, then a tree of neighbouring lanes; the "
            "same bits on every device",
            "grouping of tensors into calls and launches, threads, programs",
        ),
    )
}


def contract_id(*variants: str) -> str:
    """Contract id of a run: `rlk-2`, followed by the names of its variants (`rlk-2+fa3`)."""
    return "+".join([CONTRACT_ID, *sorted(variants)])
