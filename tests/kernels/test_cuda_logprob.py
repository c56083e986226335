"""logprob's schedules without a GPU: shape classes, samples, the choice, and the kernel's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import Launches, classes_of, milliseconds
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import clock, schedule, select
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import driver, logprob_rows_sm90
from rlkernel.kernels.cuda import logprob as cuda
from rlkernel.kernels.errors import BuildError
from rlkernel.kernels.reference import logprob as reference
from rlkernel.kernels.samples import KINDS, NONFINITE
from rlkernel.kernels.schedule import ScheduledOp, UncertifiedError
from rlkernel.kernels.triton import logprob as anchor
from rlkernel.kernels.verdicts import ANCHOR

SHAPE = cuda.LogprobShape(-1, torch.bfloat16, 1000, 256, True, False, False)
V = 128 * 128


def logits(rows: int = 256, vocab: int = V, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, dtype=dtype).expand(rows, vocab) if rows == 0 else torch.empty(rows, vocab, dtype=dtype)


@pytest.mark.parametrize("temperature", (False, True))
@pytest.mark.parametrize("kind", (*KINDS, NONFINITE))
def test_a_sample_is_of_its_class(kind: str, temperature: bool) -> None:
    shape = SHAPE._replace(temperature=temperature)
    given = cuda.sample(shape, 397, kind, torch.Generator().manual_seed(0))
    assert cuda.shape_of(*given) == shape and given[0].stride(0) == 1008, "strided rows"
    z, targets, inverse, _ = given
    rows = reference.logprob(z.float(), targets.clamp(0, 999), inverse, None)[2]
    assert rows.isnan().sum() >= 6 and (rows == -torch.inf).sum() >= 3, "rows with NaN and with -inf"
    assert rows.isfinite().sum() >= (350 if kind == NONFINITE else 380) and not {-1, 1000}.isdisjoint(targets.tolist())


def test_samples_leave_rows_for_all_blocks_to_share_and_fit_in_memory() -> None:
    for vocab, few, many in ((V, 512, 4096), (151936, 512, 1766), (1 << 19, 512, 512)):
        assert cuda.rows_of(SHAPE._replace(vocab=vocab))[-1] == few
        rows = cuda.rows_of(SHAPE._replace(vocab=vocab, rows=cuda.MANY))
        assert rows[0] == anchor.ROWS_FROM and rows[1] % 132 and rows[-1] == many
        assert 2 * vocab * rows[-1] <= max(cuda.SAMPLE_BYTES, 512 * vocab)


@pytest.mark.parametrize("chip", ((9, 0), (8, 0), (10, 0)))
def test_schedules_offered_to_each_class_and_gpu(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)

    def names(**more: Any) -> list[str]:
        key = SHAPE._replace(**{"device": 0, "vocab": 151936, **more})
        return [s.name for s in cuda.logprob.family.schedules if s.supports(key)]

    everything = ["rows.15x1", "rows.23x2"] if chip == (9, 0) else []
    for more in ({}, {"temperature": True}, {"dtype": torch.float16}, {"vocab": V}, {"rows": 1024}):
        assert names(**more) == everything, more
    assert names(vocab=256000) == everything[:1], "shared memory holds the statistics of two rows"
    for more in ({"device": -1}, {"dtype": torch.float32}, {"rows": 0}, {"dense": False}, {"kept": True},
                 {"vocab": V - 8}, {"vocab": 1 << 20}):  # fmt: skip
        assert names(**more) == [], more


def test_classes_depend_on_whether_tma_can_load_the_logits() -> None:
    targets = torch.zeros(256, dtype=torch.int64)

    def dense(z: Tensor) -> bool:
        return cuda.shape_of(z, targets, None, None).dense

    whole = logits(256, V + 16)
    assert dense(whole) and dense(whole[:, :V]) and dense(whole[:, 8:])
    assert (
        not dense(whole[:, : V + 4]) and not dense(logits(256, V + 4)[:, :V]) and not dense(whole[:1].expand(256, -1))
    )
    assert not dense(logits(V, 256).T)


def test_call_keys_decide_the_class() -> None:
    row, wide = torch.zeros(256), logits(256, 1048)
    given = (logits(255, 1024), logits(256, 1024), logits(1023, 1024), logits(1024, 1024), logits(9000, 1024),
             logits(256, 1032), wide[:, :1024], wide[:, 4:1028], logits(256, 1024, torch.float16),
             logits(256, 1028), logits(256, 1036)[:, :1024],
             )  # fmt: skip
    calls = [(z, row, inverse, kept) for z in given for inverse in (None, row) for kept in (None, row)]
    assert len(classes_of(cuda.logprob.family, calls)) == 7 * 4


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the op on a CPU with the reference as its anchor."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(cuda, "SAMPLE_BYTES", 1 << 10)
    monkeypatch.setattr(schedule, "_ops", dict(schedule._ops))

    def make(*schedules: Schedule) -> ScheduledOp:
        return ScheduledOp(dataclasses.replace(cuda.logprob.family, anchor=plain, schedules=schedules))

    return make


def plain(z: Tensor, targets: Tensor, inverse: Tensor | None, kept: Tensor | None) -> tuple[Tensor, ...]:
    x = z.float() if inverse is None else z.float() * inverse[:, None]
    lse = x.logsumexp(1)
    return x.gather(1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0] - lse, lse, lse + 1, torch.stack((lse, lse), 1)


def wrong(z: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """A wrong kernel: the last row gets the statistics of the row before."""
    out = plain(z, targets, *rest)
    out[3][-1] = out[3][-2] + 1
    return out


def test_the_kernel_is_chosen_where_it_is_equal(op: Any) -> None:
    def unbuilt(key: Any) -> Any:
        raise BuildError("logprob_rows_sm90.cu needs NVRTC")

    given = cuda.sample(SHAPE, 300, "normal", torch.Generator().manual_seed(2))
    good, bad = Schedule("rows.a", lambda key: lambda *x: plain(*x)), Schedule("rows.b", lambda key: wrong)
    made = op(bad, good)
    with schedule.strict():
        assert_bitwise(made(*given)[1], plain(*given)[1], "lse")
    assert made.chosen(*given) == "rows.a"
    first = made.verdict(*given).trials[0].first
    assert first["result"] == 3 and first["index"][0] == 255, "the statistics of the last row"
    rows = {row["schedule"]: row for row in schedule.report(torch.device("cpu")) if row["op"] == "logprob"}
    assert rows["rows.a"]["chosen"] and not rows["rows.b"]["certified"] and rows["rows.a"]["shape"]["vocab"] == 1000
    with schedule.without("rows"):
        assert made.chosen(*given) == ANCHOR
    made = op(Schedule("rows.c", unbuilt))
    with pytest.warns(RuntimeWarning, match=r"logprob .* runs without rows\.c: .*needs NVRTC"):
        made(*given)
    with schedule.strict(), pytest.raises(UncertifiedError, match=r"logprob .*needs NVRTC"):
        made(*given)


@pytest.mark.parametrize("rows", (0, 1, 131, 132, 300, 4096))
@pytest.mark.parametrize("which", ("fits", "unaligned"))
def test_arguments_of_the_kernel(which: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    same = contextlib.nullcontext()
    monkeypatch.setattr(logprob_rows_sm90.common, "on_device", lambda t: same)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(logprob_rows_sm90, "load", lambda *_, **variant: Launches(ran))
    monkeypatch.setattr(anchor, "logprob", lambda *given: ran.append("anchor"))
    monkeypatch.setattr(anchor.TileBuffers, "combine", lambda self, *out: ran.append((self, *out)))
    run = logprob_rows_sm90.launcher(0, torch.bfloat16, 1032, True, logprob_rows_sm90.SETTINGS[0])
    z = torch.empty(rows * 1040 + 16, dtype=torch.bfloat16)[8 if which == "fits" else 1 :]
    z = z[: rows * 1040].view(rows, 1040)[:, :1032]
    targets, inverse = torch.zeros(2 * rows, dtype=torch.int64)[::2], torch.ones(rows)
    found = run(z, targets, inverse, None)
    if which != "fits":
        assert ran == ["anchor"] * (z.data_ptr() % 16 != 0)
        return
    assert [tuple(t.shape) for t in found] == [(rows,)] * 3 + [(rows, 2)]
    if rows == 0:
        assert ran == []
        return
    (blocks, threads, arguments), *combined = ran
    given = {name: getattr(arguments, name) for name, _ in arguments._fields_}
    assert (blocks, threads) == (min(rows, 132), 512)
    assert given["shared"] + blocks * given["whole"] == rows and 0 <= given["shared"] < blocks
    for name, t in zip(("logp", "entropy", "lse", "stats"), found, strict=True):
        assert given[name] == t.data_ptr()
    assert (given["logits"], given["inv_temperature"]) == (z.data_ptr(), inverse.data_ptr())
    assert (given["logits_row"], given["vocab"], given["tiles"]) == (1040, 1032, 9)
    if not given["shared"]:
        assert not combined and given["tile_max"] is given["target_z"] is None
        return
    ((buffers, *out),) = combined
    assert [(t.data_ptr(), len(t)) for t in out] == [(t.data_ptr(), given["shared"]) for t in found]
    assert given["tile_max"] == buffers.maximum.data_ptr() and given["target_z"] == buffers.target.data_ptr()
    assert buffers.maximum.shape == (given["shared"], 9) and len(buffers.target) == given["shared"]


def test_shared_memory_holds_what_the_source_lays_out() -> None:
    for setting in logprob_rows_sm90.SETTINGS:
        assert (setting.warps + 1) % 4 == 0, "the warps of a block fill the four SM partitions evenly"
        assert [logprob_rows_sm90.turns_of(setting, v) for v in (32000, 230000)] == [4, 4 if setting.warps == 15 else 2]
        pieces = setting.warps * setting.pieces * 8192 // setting.lanes
        for vocab, tiles in ((257, 3), (151936, 1187)):
            turns = logprob_rows_sm90.macros(setting, vocab, False, False)["TURNS"]
            size = pieces + turns * 12 * tiles + 8 * setting.warps * setting.pieces + 16 * turns
            assert logprob_rows_sm90.shared_bytes(setting, vocab) == size <= driver.SHARED_BYTES


def test_the_gradient_is_the_anchors() -> None:
    import rlkernel.ops  # noqa: F401, declares them

    assert select.functions("cuda").get("logprob") is cuda.logprob
    assert select.functions("cuda").get("logprob_dgrad") is None
