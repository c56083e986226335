"""attention in the fa3 order: FlashAttention-3 with one split, where its uses agree to the bit on this machine.

The dense call over packed sequences defines the bits. Before first use with a dtype, head counts, head dim and page
size, sequences alone, in other packings, in chunks and from pages are compared with it; the verdict is kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import certification, samples, verdicts
from rlkernel.kernels.errors import VariantError

FORMAT = "attention fa3 2"  # of the verdict files; files of another format are not read
PAGE = 16  # page size that a dense call is certified with: the engine's default
DTYPES = (torch.bfloat16, torch.float16)
INSTALL = "install vllm, or flash_attn_3, for this torch; or use attention variant 'split'"

# What is compared. FA3 picks its tile by the longest query of a batch, by heads and by paging, and takes keys in blocks
# of 80 to 192; the lengths lie on both sides of these.
LENGTHS = (777, 1, 130, 1100, 64, 500)
QUERIES = (1, 2, 5, 9, 16, 33, 64, 100, 128, 500)
ENDS = (2000, 129)  # chunks end with the sequence, or at this key
LAUNCHED_FOR = 4096  # keys and queries of a launch that is larger than its batch, as in CUDA graphs

Pair = tuple[Tensor, Tensor]


# ---- the library ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """An installed FlashAttention-3: causal, one split, (out [T, H, D], natural-log LSE [H, T]).

    Attributes:
        dense: (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale).
        paged: (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k, scale), and
            `out`, where the result goes.
        versions: what a verdict holds for: package, version, hash of the binary.
        device: type of the devices it runs on.
    """

    dense: Callable[..., Pair]
    paged: Callable[..., Pair]
    versions: dict[str, str]
    device: str = "cuda"


def _versions(package: str, *binaries: str) -> dict[str, str]:
    """A source build keeps its version over many commits, so the binary counts too."""
    file = next((sys.modules[name].__file__ for name in binaries if name in sys.modules), None)
    found = {"flash_attention_3": f"{package} {metadata.version(package)}"}
    if file is not None:
        with open(file, "rb") as binary:
            found["binary"] = hashlib.file_digest(binary, "sha256").hexdigest()[:16]
    return found


def _from_vllm() -> Library:
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not interface.FA3_AVAILABLE:
        raise ImportError(interface.FA3_UNAVAILABLE_REASON)
    call = functools.partial(
        interface.flash_attn_varlen_func, causal=True, num_splits=1, fa_version=3, return_softmax_lse=True
    )

    def dense(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
    ) -> Pair:
        out, lse = call(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale
        )
        return out, lse

    def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int,
              scale: float, out: Tensor | None = None) -> Pair:  # fmt: skip
        found, lse = call(
            q, k, v, cu_seqlens_q=cu_q, seqused_k=lens, block_table=table, max_seqlen_q=max_q, max_seqlen_k=max_k,
            softmax_scale=scale, out=out,
        )  # fmt: skip
        return found, lse

    return Library(dense, paged, _versions("vllm", "vllm.vllm_flash_attn._vllm_fa3_C"))


def _from_package() -> Library:
    """The package of FlashAttention's own repository, under either of its names."""
    try:
        interface = importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError:
        interface = importlib.import_module("flash_attn_3.flash_attn_interface")
    varlen, cached = interface.flash_attn_varlen_func, interface.flash_attn_with_kvcache
    offered = inspect.signature(varlen).parameters
    for function, names in (
        (varlen, ("num_splits", "softmax_scale")),
        (cached, ("num_splits", "page_table", "cu_seqlens_q", "return_softmax_lse")),
    ):
        missing = [name for name in names if name not in inspect.signature(function).parameters]
        if missing:
            raise ImportError(f"its {function.__name__} has no {', '.join(missing)}")
    # Newer versions return the LSE on request only.
    ask = {"return_attn_probs": True} if "return_attn_probs" in offered else {}

    @torch.no_grad()
    def dense(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
    ) -> Pair:
        out, lse, *_ = varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale,
            causal=True, num_splits=1, **ask,
        )  # fmt: skip
        return out, lse

    @torch.no_grad()
    def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int,
              scale: float, out: Tensor | None = None) -> Pair:  # fmt: skip
        found, lse, *_ = cached(
            q, k, v, cache_seqlens=lens, page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=max_q, softmax_scale=scale,
            causal=True, num_splits=1, return_softmax_lse=True,
        )  # fmt: skip
        return found if out is None else out.copy_(found), lse

    return Library(dense, paged, _versions("flash_attn_3", "flash_attn_3._C", "flash_attn_3_cuda"))


@functools.cache
def find() -> Library | str:
    """The installed FlashAttention-3, vLLM's before the package of its own; or why there is none."""
    reasons = []
    for name, load in (("vllm", _from_vllm), ("flash_attn_3", _from_package)):
        try:
            return load()
        except ModuleNotFoundError as error:
            reasons.append(f"{name}: no module {error.name}")
        except Exception as error:  # a package built for another torch fails in many ways
            reasons.append(f"{name}: {certification.one_line(error)}")
    return "; ".join(reasons)


def unavailable(device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot run on a device at all, or None."""
    library = find()
    if isinstance(library, str):
        where = "" if device.type == "cuda" else f", and the tensors are on {device.type}"
        return f"FlashAttention-3 is not importable ({library}){where}; {INSTALL}"
    if device.type != library.device:
        return f"FlashAttention-3 runs on {library.device}, the tensors are on {device.type}; use variant 'split' there"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return f"FlashAttention-3 is for GPUs of compute capability 9, not {torch.cuda.get_device_name(device)}"
    return None


# ---- certification -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What a verdict is about."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    halves: bool = False  # keys and values are the halves of one cache [pages, page, HK, 2 D]

    @property
    def place(self) -> torch.device:
        return torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device)

    def describe(self) -> dict[str, Any]:
        """As plain data, without the device's index."""
        return {
            "D": self.head_dim, "H": self.heads, "HK": self.kv_heads, "dtype": str(self.dtype).removeprefix("torch."),
            "page": self.page, **({"halves": True} if self.halves else {}),
        }  # fmt: skip


@dataclass
class Verdict:
    """Outcome of one certification.

    Attributes:
        identity: what it holds for: machine, library, shape, source.
        reason: how much was equal, or what was not.
        calls, differing: number of calls compared with the dense one, and of those that differ.
        first: where the first difference is: kind (of values, and the call), rows, index [sequence, position, head,
            element], actual, expected, ulps, mismatches, elements, result (0: out, 1: LSE).
    """

    identity: dict[str, Any]
    seed: int
    certified: bool
    reason: str
    calls: int = 0
    differing: int = 0
    elements: int = 0
    first: dict[str, Any] | None = None


class Span(NamedTuple):
    """Queries [first, last) of a sequence over its keys [0, last)."""

    sequence: int
    first: int
    last: int


class Call(NamedTuple):
    """One use of the kernel: its spans, and the sizes it is launched for beyond theirs."""

    name: str
    spans: Sequence[Span]
    paged: bool
    least: int = 0


def calls() -> Iterator[Call]:
    """Every use that is compared with the dense call over `LENGTHS`."""
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
        yield Call(f"decode beside prefill {where}", mixed_spans, paged)
    tokens = [Span(b, i, i + 1) for b in each for i in range(lengths[b])]
    yield Call("decode of every position in one batch", tokens, True)
    yield Call(f"decode of every 29th position, launched for {LAUNCHED_FOR}", tokens[::29], True, LAUNCHED_FOR)


class Sample:
    """Random sequences of one kind of values, packed and in pages, and the calls over them."""

    def __init__(self, library: Library, shape: Shape, kind: str, generator: torch.Generator) -> None:
        self.library, self.shape = library, shape
        self.scale = samples.SCALES[samples.KINDS.index(kind) % len(samples.SCALES)] * shape.head_dim**-0.5
        total, device, page, d = sum(LENGTHS), generator.device, shape.page, shape.head_dim
        self.starts = [0, *accumulate(LENGTHS)]

        # Scores far beyond 2^24 are NaN in any kernel that fuses scale and maximum; float16's ranges stay below that.
        dtype = shape.dtype if kind == "denormal" else torch.float16

        def draw(heads: int, second: bool = False) -> Tensor:
            drawn = samples.values(kind, total * heads, d, dtype, generator, second=second, narrow=True)
            return drawn.to(shape.dtype).view(total, heads, d)

        self.q, self.k, self.v = draw(shape.heads), draw(shape.kv_heads, True), draw(shape.kv_heads)
        needed = [-(-n // page) for n in LENGTHS]
        self.columns = max(needed)
        order = torch.randperm(sum(needed) + 3, device=device, generator=generator).int()
        # Entries past a sequence's end name some page, and slots past it hold what another sequence left there.
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
        max_q, max_k = max(call.least, *queries), max(call.least, *keys)
        q, cu_q = self.q[self.rows(spans)], self._int([0, *accumulate(queries)])
        if not call.paged:
            tokens = self._tokens([(self.starts[s.sequence], s.last) for s in spans])
            cu_k = self._int([0, *accumulate(keys)])
            return _dense(self.library, q, self.k[tokens], self.v[tokens], cu_q, cu_k, max_q, max_k, self.scale)
        columns = self.table.shape[1] if call.least else self.columns
        table = self.table[self._int([s.sequence for s in spans]).long(), :columns]
        return _paged(
            self.library, q, self.k_cache, self.v_cache, table, cu_q, self._int(keys), max_q, max_k, self.scale
        )

    def where(self, spans: Sequence[Span], index: list[int]) -> list[int]:
        """[sequence, position, head, ...] of an element of a call's result."""
        row = index[0]
        for span in spans:
            if row < span.last - span.first:
                return [span.sequence, span.first + row, *index[1:]]
            row -= span.last - span.first
        raise IndexError(f"row {index[0]} lies beyond the spans")

    def _int(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)

    def _tokens(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """first, first + 1, ... of all (first, count), one after another."""
        first, count = torch.tensor(ranges).unbind(1)
        within = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
        return (first.repeat_interleave(count) + within).to(self.q.device)


def _dense(library: Library, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
           scale: float) -> Pair:  # fmt: skip
    # A longest query of 1 makes FA3 drop the causal mask and choose another block of keys, and with it other bits.
    out, lse = library.dense(q, k, v, cu_q, cu_k, max(2, max_q), max_k, scale)
    return out, lse.t()


def _paged(library: Library, q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_q: Tensor, lens: Tensor, max_q: int,
           max_k: int, scale: float, into: Tensor | None = None) -> Pair:  # fmt: skip
    given = {} if into is None else {"out": into}
    out, lse = library.paged(q, k, v, table, cu_q, lens, max(2, max_q), max_k, scale, **given)
    return out, lse.t()


@certification.tolerant()
def certify(library: Library, shape: Shape, seed: int | None = None) -> Verdict:
    """Compares every use with the dense call, on all kinds of values.

    Args:
        seed: of the data; fresh by default, and part of the evidence.

    Raises:
        torch.OutOfMemoryError: whatever else a call raises is a refusal.
    """
    seed = secrets.randbits(31) if seed is None else seed
    generator = torch.Generator(shape.place).manual_seed(seed)
    verdict = Verdict(_identity(library, shape), seed, True, "")
    name = "the dense call"
    try:
        where = shape.place
        with torch.no_grad(), certification.current(where):
            for kind in samples.KINDS:
                sample = Sample(library, shape, kind, generator)
                name = "the dense call"
                expected = sample.dense()
                for call in calls():
                    name = call.name
                    rows = sample.rows(call.spans)
                    wanted = [x[rows] for x in expected]
                    certification.poison(wanted)
                    found = certification.first_difference(list(sample.run(call)), wanted)
                    verdict.calls += 1
                    verdict.elements += sum(x.numel() for x in wanted)
                    if found is None:
                        continue
                    verdict.differing += 1
                    if verdict.first is None:
                        if found["index"] is not None:
                            found["index"] = sample.where(call.spans, found["index"])
                        verdict.first = {"kind": f"{kind} values, {name}", "rows": rows.numel(), **found}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        verdict.certified, verdict.reason = False, f"raised in {name}: {certification.one_line(error)}"
        return verdict
    if verdict.differing:
        verdict.certified = False
        verdict.reason = f"{verdict.differing} of {verdict.calls} calls differ from the dense one"
    else:
        verdict.reason = f"{verdict.calls} calls equal the dense one, {verdict.elements} elements"
    return verdict


def _identity(library: Library, shape: Shape) -> dict[str, Any]:
    found = {
        **verdicts.machine(shape.place),
        **library.versions,
        "op": "attention fa3",
        "shape": shape.describe(),
        "source": verdicts.source_digest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it comes back from a file
    return plain


# ---- dispatch ------------------------------------------------------------------------------------

_lock = threading.RLock()
_settled: dict[Shape, Library] = {}
_verdicts: dict[Shape, Verdict] = {}


def forget() -> None:
    """Decides anew at the next call, as a new process does."""
    with _lock:
        _settled.clear()
        _verdicts.clear()


def verdict(shape: Shape) -> Verdict:
    """The verdict on a shape: of this process, from its file, or made now.

    Raises:
        VariantError: FlashAttention-3 cannot run there at all, or the first use fell into a CUDA graph capture.
    """
    library = find()
    reason = unavailable(shape.place)
    if reason is not None:
        raise VariantError(f"attention variant 'fa3': {reason}")
    assert isinstance(library, Library)
    if shape.dtype not in DTYPES:
        raise VariantError(
            f"attention variant 'fa3' takes bfloat16 and float16, not {shape.describe()['dtype']}; cast the model, or "
            "use variant 'split'"
        )
    with _lock:
        if shape not in _verdicts:
            if certification.capturing(shape.place):
                raise VariantError(
                    f"attention variant 'fa3' {shape.describe()}: its first use fell into a CUDA graph capture, where "
                    "nothing can be certified; run the shape once before"
                )
            identity = _identity(library, shape)
            path = verdicts.verdict_path(identity)
            data = verdicts.load(path, FORMAT)
            kept = None if data is None else Verdict(**data)
            if kept is None or kept.identity != identity:
                kept = certify(library, shape)
                if not kept.reason.startswith("raised"):  # an error may not come again
                    verdicts.keep(path, asdict(kept), FORMAT)
            _verdicts[shape] = kept
        return _verdicts[shape]


def require(shape: Shape) -> Library:
    """The library, where it is certified for the shape.

    Raises:
        VariantError: it is missing, cannot run there, or was refused; the message says which and names the first
            difference.
    """
    found = verdict(shape)
    if not found.certified:
        first = found.first
        where = ""
        if first is not None:
            where = (
                f"; first: {first['kind']}, [sequence, position, head, element] {first['index']}: {first['actual']}, "
                f"dense {first['expected']}"
            )
        raise VariantError(
            f"attention variant 'fa3' is refused for {shape.describe()} on this machine: {found.reason}{where}. Use "
            "variant 'split' on both sides"
        )
    library = find()
    assert isinstance(library, Library)
    _settled[shape] = library
    return library


def _usable(x: Tensor) -> Tensor:
    """As TMA wants it: 16-byte aligned rows with contiguous elements."""
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
    shape = Shape(q.get_device(), q.dtype, q.shape[1], k.shape[1], q.shape[2], PAGE)
    library = _settled.get(shape) or require(shape)
    if q.shape[0] == 0:
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32).t()
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return _dense(library, _usable(q), _usable(k), _usable(v), cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale)


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
    """The same over pages; `out`: contiguous, where the result goes.

    Raises:
        VariantError: as `require`.
    """
    _, page, hk, d = k_cache.shape
    halves = k_cache.stride() == v_cache.stride() == (2 * page * hk * d, 2 * hk * d, 2 * d, 1)
    if not halves:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    shape = Shape(q.get_device(), q.dtype, q.shape[1], hk, q.shape[2], page, halves)
    library = _settled.get(shape) or require(shape)
    if q.shape[0] == 0:
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32).t()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    return _paged(
        library, _usable(q), k_cache, v_cache, table, cu_seqlens_q.contiguous(), seq_lens_k.contiguous(), max_seqlen_q,
        max_seqlen_k, scale, out,
    )  # fmt: skip
