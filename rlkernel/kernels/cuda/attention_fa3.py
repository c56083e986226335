"""Attention variant fa3: FlashAttention-3 with one split, certified on this machine before its first use.

The dense call over packed sequences defines the bits. For each dtype, head layout and page size, calls with single
sequences, other packings, chunks and pages are compared with it, and the verdict is stored on disk. Unlike a
`ScheduledOp`, a variant has no anchor to fall back to: if it is refused, a call raises.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import certification, samples, verdicts
from rlkernel.kernels.cuda import fa3_library
from rlkernel.kernels.cuda.fa3_library import Library, Pair
from rlkernel.kernels.errors import VariantError
from rlkernel.kernels.verdicts import Trial, Verdict

PAGE = 16  # page size that dense calls are certified with: the engine's default
DTYPES = (torch.bfloat16, torch.float16)

# Sequences to compare. FA3 picks its tile by the longest query of the batch, head count and paging, and takes keys in
# blocks of 80 to 192; these lengths are below and above both limits.
LENGTHS = (777, 1, 130, 1100, 64, 500)
QUERIES = (1, 2, 5, 9, 16, 33, 64, 100, 128, 500)
ENDS = (2000, 129)  # chunks end with the sequence, or at this key
LAUNCHED_FOR = 4096  # max_seqlen of launches that are sized for longer sequences than the batch has, as in CUDA graphs


# ---- certification -------------------------------------------------------------------------------


class FA3Shape(NamedTuple):
    """Shape class of a verdict."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    halves: bool = False  # keys and values are halves of one cache [pages, page, HK, 2 D]

    def describe(self) -> dict[str, Any]:
        """As plain data, without the device's index."""
        return {
            "D": self.head_dim, "H": self.heads, "HK": self.kv_heads, "dtype": str(self.dtype).removeprefix("torch."),
            "page": self.page, **({"halves": True} if self.halves else {}),
        }  # fmt: skip


class Span(NamedTuple):
    """Queries [first, last) of a sequence over its keys [0, last)."""

    sequence: int
    first: int
    last: int


class Call(NamedTuple):
    """One call of the kernel."""

    name: str
    spans: Sequence[Span]
    paged: bool
    least: int = 0  # lower bound of max_seqlen_q and max_seqlen_k


def calls() -> Iterator[Call]:
    """Every call that is compared with the dense call over `LENGTHS`."""
    lengths = LENGTHS
    each = range(len(lengths))
    whole = [Span(b, 0, lengths[b]) for b in each]
    for n in (1, 2, 7, 32):
        yield Call(f"prefixes of {n}", [Span(b, 0, min(n, lengths[b])) for b in each], False)
    mixed = [1, 130, 1, 1, 500, 64]
    mixed_spans = [Span(b, max(0, lengths[b] - mixed[b % 6]), lengths[b]) for b in each]
    for paged in (False, True):
        where = "from pages" if paged else "dense"
        yield Call(f"whole sequences {where}, launched for {LAUNCHED_FOR}", whole[::-1], paged, LAUNCHED_FOR)
        for b in each:
            yield Call(f"sequence of {lengths[b]} alone {where}", [whole[b]], paged)
            yield Call(f"last token of {lengths[b]} alone {where}", [Span(b, lengths[b] - 1, lengths[b])], paged)
        for end in ENDS:
            for n in QUERIES:
                ends = [min(end, length) for length in lengths]
                spans = [Span(b, max(0, ends[b] - n), ends[b]) for b in each]
                yield Call(f"chunks of {n} {where}, ending at {max(ends)} or before", spans, paged)
        yield Call(f"decode with prefill {where}", mixed_spans, paged)
    tokens = [Span(b, i, i + 1) for b in each for i in range(lengths[b])]
    yield Call("decode of every position in one batch", tokens, True)
    yield Call(f"decode of every 29th position, launched for {LAUNCHED_FOR}", tokens[::29], True, LAUNCHED_FOR)


class Sequences:
    """Random sequences of one kind of values, packed and in pages, and the calls on them."""

    def __init__(self, library: Library, shape: FA3Shape, kind: str, generator: torch.Generator) -> None:
        self.library, self.shape = library, shape
        scales = samples.SCALES
        self.scale = scales[samples.KINDS.index(kind) % len(scales)] * shape.head_dim**-0.5
        total, device, page, d = sum(LENGTHS), generator.device, shape.page, shape.head_dim
        self.starts = [0, *accumulate(LENGTHS)]

        # Scores far beyond 2^24 give NaN, because scale and maximum are fused; the ranges of float16 stay below.
        dtype = shape.dtype if kind == "denormal" else torch.float16

        def draw(heads: int, second: bool = False) -> Tensor:
            drawn = samples.values(kind, total * heads, d, dtype, generator, second=second, narrow=True)
            return drawn.to(shape.dtype).view(total, heads, d)

        self.q, self.k, self.v = draw(shape.heads), draw(shape.kv_heads, True), draw(shape.kv_heads)
        needed = [-(-n // page) for n in LENGTHS]
        self.columns = max(needed)
        order = torch.randperm(sum(needed) + 3, device=device, generator=generator).int()
        # Table entries past a sequence's end name a valid page; slots past it keep another sequence's content.
        self.table = order[0].repeat(len(LENGTHS), max(self.columns, -(-LAUNCHED_FOR // page)))
        at = 3
        for b, count in enumerate(needed):
            self.table[b, :count] = order[at : at + count]
            at += count
        slots = torch.cat([
            (self.table[b, : needed[b], None].long() * page + torch.arange(page, device=device)).view(-1)[: LENGTHS[b]]
            for b in range(len(LENGTHS))
        ])  # fmt: skip
        self.k_cache, self.v_cache = self._pages(order.numel() * page, slots)

    def _pages(self, size: int, slots: Tensor) -> Pair:
        """Both caches [pages, page, HK, D]: two tensors, or the halves of one."""
        heads, d = self.k.shape[1:]
        if self.shape.halves:
            both = self.k.new_full((size, heads, 2 * d), 100.0)
            keys, values = both[..., :d], both[..., d:]
        else:
            keys, values = self.k.new_full((size, heads, d), 100.0), self.v.new_full((size, heads, d), 100.0)
        keys[slots], values[slots] = self.k, self.v
        return keys.unflatten(0, (-1, self.shape.page)), values.unflatten(0, (-1, self.shape.page))

    def dense(self) -> Pair:
        """The definition: all sequences in one dense call."""
        return self.run(Call("", [Span(b, 0, n) for b, n in enumerate(LENGTHS)], False))

    def rows(self, spans: Sequence[Span]) -> Tensor:
        """Token of each query of the spans, in the packed sequences."""
        return self._tokens([(self.starts[s.sequence] + s.first, s.last - s.first) for s in spans])

    def run(self, call: Call) -> Pair:
        """(out, LSE [T, H]) of a call."""
        spans = call.spans
        queries, keys = [s.last - s.first for s in spans], [s.last for s in spans]
        sizes = {"max_q": max(call.least, *queries), "max_k": max(call.least, *keys), "scale": self.scale}
        q, cu_q = self.q[self.rows(spans)], self._int([0, *accumulate(queries)])
        if not call.paged:
            tokens = self._tokens([(self.starts[s.sequence], s.last) for s in spans])
            cu_k = self._int([0, *accumulate(keys)])
            return _dense(self.library, q, self.k[tokens], self.v[tokens], cu_q, cu_k, **sizes)
        columns = self.table.shape[1] if call.least else self.columns
        table = self.table[self._int([s.sequence for s in spans]).long(), :columns]
        return _paged(self.library, q, self.k_cache, self.v_cache, table, cu_q, self._int(keys), **sizes)

    def where(self, spans: Sequence[Span], index: list[int]) -> list[int]:
        """[sequence, position, head, ...] of an element of a call's result."""
        token = int(self.rows(spans)[index[0]])
        sequence = bisect_right(self.starts, token) - 1
        return [sequence, token - self.starts[sequence], *index[1:]]

    def _int(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)

    def _tokens(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """first, first + 1, ... of all (first, count), one after another."""
        return torch.cat([torch.arange(first, first + count) for first, count in ranges]).to(self.q.device)


def _dense(library: Library, *tensors: Tensor, max_q: int, max_k: int, scale: float) -> Pair:
    # max_seqlen_q = 1 makes FA3 drop the causal mask and choose another key block, which changes the bits.
    out, lse = library.dense(*tensors, max(2, max_q), max_k, scale)
    return out, lse.t()


def _paged(library: Library, *tensors: Tensor, max_q: int, max_k: int, scale: float, out: Tensor | None = None) -> Pair:
    found, lse = library.paged(*tensors, max(2, max_q), max_k, scale, **({} if out is None else {"out": out}))
    return found, lse.t()


@certification.warn_only_determinism()
def certify(library: Library, shape: FA3Shape, seed: int | None = None) -> Verdict:
    """Compares every call with the dense call, on all kinds of values.

    Args:
        seed: of the data; random by default, and part of the evidence.

    Returns:
        A verdict with one trial. Its first difference has the kind of values and the call as "kind", and the index
        [sequence, position, head, element].

    Raises:
        torch.OutOfMemoryError: any other error of a call is a refusal.
    """
    seed = secrets.randbits(31) if seed is None else seed
    generator = torch.Generator(certification.device_of(shape)).manual_seed(seed)
    trial, count, differing, name = Trial("fa3", False, ""), 0, 0, ""
    verdict = Verdict(_identity(library, shape), list(LENGTHS), list(samples.KINDS), seed, 0.0, [trial])
    try:
        with torch.no_grad(), certification.on_device(certification.device_of(shape)):
            for kind in samples.KINDS:
                sequences = Sequences(library, shape, kind, generator)
                name = "the dense call"
                expected = sequences.dense()
                for call in calls():
                    name = call.name
                    rows = sequences.rows(call.spans)
                    wanted = [x[rows] for x in expected]
                    certification.poison(wanted)
                    found = certification.first_difference(list(sequences.run(call)), wanted)
                    count += 1
                    trial.elements += sum(x.numel() for x in wanted)
                    differing += found is not None
                    if found is not None and trial.first is None:
                        if found["index"] is not None:
                            found["index"] = sequences.where(call.spans, found["index"])
                        trial.first = {"kind": f"{kind} values, {name}", "rows": rows.numel(), **found}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        trial.reason = f"raised in {name}: {certification.one_line(error)}"
        return verdict
    trial.certified = differing == 0
    trial.reason = f"{count} calls equal the dense one, {trial.elements} elements"
    if differing:
        trial.reason = f"{differing} of {count} calls differ from the dense one"
    return verdict


def _identity(library: Library, shape: FA3Shape) -> dict[str, Any]:
    return {
        **verdicts.machine(certification.device_of(shape)),
        **library.versions,
        "op": "attention fa3",
        "shape": shape.describe(),
        "source": verdicts.source_digest(),
    }


# ---- dispatch ------------------------------------------------------------------------------------

_lock = threading.RLock()
_settled: dict[FA3Shape, Library] = {}
_verdicts: dict[FA3Shape, Verdict] = {}


def forget() -> None:
    """Drops all verdicts of this process, so that the next call reads or makes them again."""
    with _lock:
        _settled.clear()
        _verdicts.clear()


def verdict(shape: FA3Shape) -> Verdict:
    """The verdict on a shape class: this process's, the stored one, or one made now; it has one trial.

    Raises:
        VariantError: FlashAttention-3 cannot run there, or the first use fell into a CUDA graph capture.
    """
    library, reason = fa3_library.find(), fa3_library.unavailable(certification.device_of(shape))
    if reason is not None or isinstance(library, str):
        raise VariantError(f"attention variant 'fa3': {reason}")
    if shape.dtype not in DTYPES:
        raise VariantError(
            f"attention variant 'fa3' takes bfloat16 and float16, not {shape.describe()['dtype']}; cast the model, or "
            "use variant 'split'"
        )
    with _lock:
        if shape not in _verdicts:
            if certification.capturing(certification.device_of(shape)):
                raise VariantError(
                    f"attention variant 'fa3' {shape.describe()}: its first use fell into a CUDA graph capture, where "
                    "nothing can be certified; run the shape once before"
                )
            found = verdicts.load(_identity(library, shape))
            if found is None:
                found = certify(library, shape)
                if not found.trials[0].reason.startswith("raised"):  # an error may be transient
                    verdicts.store(found)
            _verdicts[shape] = found
        return _verdicts[shape]


def require(shape: FA3Shape) -> Library:
    """The library, if it is certified for the shape class.

    Raises:
        VariantError: it is missing, cannot run there, or was refused; the message says which and names the first
            difference.
    """
    trial = verdict(shape).trials[0]
    if not trial.certified:
        first, where = trial.first, ""
        if first is not None:
            where = (
                f"; first: {first['kind']}, [sequence, position, head, element] {first['index']}: {first['actual']}, "
                f"dense {first['expected']}"
            )
        raise VariantError(
            f"attention variant 'fa3' is refused for {shape.describe()} on this machine: {trial.reason}{where}. Use "
            "variant 'split' on both sides"
        )
    library = fa3_library.find()
    assert isinstance(library, Library)
    _settled[shape] = library
    return library


def _usable(x: Tensor) -> Tensor:
    """x with contiguous elements and rows at 16-byte addresses, as TMA needs."""
    size = x.element_size()
    strides = x.stride()
    if strides[-1] == 1 and not (x.data_ptr() | strides[-2] * size | strides[-3] * size) & 15:
        return x
    return x.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, H] fp32 as the transpose of [H, T]
    """Causal attention over packed sequences; certified with pages of `PAGE` tokens.

    Raises:
        VariantError: as `require`.
    """
    shape = FA3Shape(q.get_device(), q.dtype, q.shape[1], k.shape[1], q.shape[2], PAGE)
    library = _settled.get(shape) or require(shape)
    if q.shape[0] == 0:
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32).t()
    tensors = _usable(q), _usable(k), _usable(v), cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return _dense(library, *tensors, max_q=max_seqlen_q, max_k=max_seqlen_k, scale=scale)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, H] fp32 as the transpose of [H, T]
    """Causal attention over pages; a contiguous `out` receives the result.

    Raises:
        VariantError: as `require`.
    """
    _, page, hk, d = k_cache.shape
    halves = k_cache.stride() == v_cache.stride() == (2 * page * hk * d, 2 * hk * d, 2 * d, 1)
    if not halves:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    shape = FA3Shape(q.get_device(), q.dtype, q.shape[1], hk, q.shape[2], page, halves)
    library = _settled.get(shape) or require(shape)
    if q.shape[0] == 0:
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32).t()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    tensors = _usable(q), k_cache, v_cache, table, cu_seqlens_q.contiguous(), seq_lens_k.contiguous()
    return _paged(library, *tensors, max_q=max_seqlen_q, max_k=max_seqlen_k, scale=scale, out=out)
