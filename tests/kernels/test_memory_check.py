"""Controls of `memory_check.py`: each test has a valid access, and an invalid one that the checker must report."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":
    from triton_interpreter import run

    def test_in_the_interpreter() -> None:
        run(__file__)

else:
    import triton
    import triton.language as tl
    from memory_check import MemoryFault, elements_of
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def copy_kernel(x, y, first_x, first_y, N, BLOCK: tl.constexpr, STEP: tl.constexpr):
        i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
        tl.store(y + first_y + i, tl.load(x + first_x + i, mask=i < N), mask=i < N)

    @triton.jit
    def either_kernel(x, y, out):
        i = tl.arange(0, 8)
        tl.store(out + i, tl.load(tl.where(i < 4, x + i, y + i)))

    @triton.jit
    def box_kernel(box, out):
        tl.store(out + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :], box.load([0, 0]))

    @triton.jit
    def table_kernel(table, out, at, ALIGNED: tl.constexpr):
        x = tl.load(table).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            x = tl.multiple_of(x, 16)
        tl.store(out, tl.load(x + at))

    @triton.jit
    def fold_kernel(x):
        i = tl.arange(0, 8)
        tl.store(x + i % 4, i)

    @triton.jit
    def count_kernel(x, at):
        tl.atomic_add(x + at, 1)

    @triton.jit
    def count_each_kernel(table, at):
        tl.atomic_add(tl.load(table + tl.arange(0, 2)).to(tl.pointer_type(tl.int32)) + at, 1)

    def copy(x: Tensor, y: Tensor, x_at: int = 0, y_at: int = 0, n: int = 6, programs: int = 1, step: int = 0) -> None:
        copy_kernel[(programs,)](x, y, x_at, y_at, n, BLOCK=step or 8, STEP=step)

    def test_gaps_and_shared_elements_are_found() -> None:
        for shape, stride in (((3, 4), (4, 1)), ((3, 4), (1, 3)), ((1, 5), (9, 1)), ((4, 1, 2), (2, 7, 1)), ((), ())):
            assert elements_of(shape, stride, 2)[1] is None
        for shape, stride in (((3, 4), (5, 1)), ((4,), (2,)), ((2, 3), (5, 0)), ((2, 2), (1, 4))):
            size, held = elements_of(shape, stride, 2)
            assert held is not None and len(held) == size and not held.all()

    def halves() -> tuple[Tensor, Tensor]:
        """Views of the middle six of twelve numbers."""
        return torch.arange(12).half()[3:9], torch.zeros(12).half()[3:9]

    @pytest.mark.parametrize("place,where", ((1, "+ 12, 2 bytes past its end"), (-1, "+ -2, 2 bytes in front of it")))
    def test_an_element_next_to_a_view(place: int, where: str) -> None:
        x, y = halves()
        copy(x, y)
        assert torch.equal(x, y)
        with pytest.raises(MemoryFault) as failed:
            copy(x, y, x_at=place)
        assert f"copy_kernel, program (0, 0, 0): loads 2 bytes at `x` {where}" in str(failed.value)
        with pytest.raises(MemoryFault) as failed:
            copy(x, y, y_at=place)
        assert f"copy_kernel, program (0, 0, 0): stores 2 bytes at `y` {where}" in str(failed.value)

    def test_memory_between_the_elements_of_a_view() -> None:
        x, y = torch.zeros(2, 8)[:, :4], torch.empty(16)
        copy(x, y, n=4)
        copy(x, y, x_at=8, n=4)
        with pytest.raises(MemoryFault, match=r"`x` \+ 16, between its elements; .* 2 lanes"):
            copy(x, y)

    def test_addresses_of_two_arguments_in_one_load() -> None:
        x, y, out = torch.arange(4.0), torch.arange(8.0), torch.empty(8)
        either_kernel[(1,)](x, y, out)
        assert torch.equal(out, y)
        with pytest.raises(MemoryFault, match=r"`x` \+ 12, 4 bytes past"):
            either_kernel[(1,)](x[:3], y, out)

    def test_a_tensor_descriptor_larger_than_its_tensor() -> None:
        x, out = torch.zeros(32)[:24].view(3, 8), torch.empty(4, 8)
        box_kernel[(1,)](TensorDescriptor(x, [3, 8], [8, 1], [4, 8]), out)
        assert not out.any()
        with pytest.raises(MemoryFault, match=r"`box` \+ 124, 32 bytes past"):
            box_kernel[(1,)](TensorDescriptor(x, [4, 8], [8, 1], [4, 8]), out)

    def test_an_address_from_a_table() -> None:
        x, out = torch.arange(5.0)[1:], torch.empty(1)
        table = torch.tensor([x.data_ptr()])
        table_kernel[(1,)](table, out, 3, ALIGNED=False)
        assert out == 4
        with pytest.raises(MemoryFault, match=r"`a tensor \(4,\)` \+ 16, 4 bytes past"):
            table_kernel[(1,)](table, out, 4, ALIGNED=False)
        with pytest.raises(MemoryFault, match="is not a multiple of 16"):
            table_kernel[(1,)](table, out, 3, ALIGNED=True)

    @pytest.mark.parametrize(
        "x_at,y_at,step,what",
        (
            (0, 16, 0, "stores 4 bytes at `y` + 64 that another program of the launch has written"),
            (0, 4, 4, "loads 4 bytes at `x` + 16 that another program of the launch has written"),
            (4, 0, 4, "stores 4 bytes at `y` + 16 that another program of the launch has read"),
        ),
    )
    def test_two_programs_that_access_one_element(x_at: int, y_at: int, step: int, what: str) -> None:
        x = torch.arange(32.0)
        copy(x, x, x_at, y_at, 8)
        copy(x, x, 0, 16, 8, programs=2, step=4)
        with pytest.raises(MemoryFault) as failed:
            copy(x, x, x_at, y_at, 8, programs=2, step=step)
        assert f"copy_kernel, program (1, 0, 0): {what}" in str(failed.value)

    def test_two_values_for_one_address() -> None:
        with pytest.raises(
            MemoryFault, match=r"fold_kernel, program \(0, 0, 0\): stores several values at one address"
        ):
            fold_kernel[(1,)](torch.empty(4, dtype=torch.int32))

    def test_atomics_of_several_programs_do_not_conflict() -> None:
        x = torch.zeros(2, dtype=torch.int32)
        count_kernel[(3,)](x, 1)
        assert x.tolist() == [0, 3]
        with pytest.raises(MemoryFault, match=r"updates 4 bytes at `x` \+ 8, 4 bytes past"):
            count_kernel[(3,)](x, 2)

    def test_atomics_on_several_tensors_of_a_table() -> None:
        x, y = torch.zeros(2, 9, dtype=torch.int32).unbind()
        table = torch.tensor([y.data_ptr(), x.data_ptr()])
        count_each_kernel[(2,)](table, 8)
        assert x.sum() == x[8] == y.sum() == y[8] == 2
        table[0] = y.data_ptr() + 8
        with pytest.raises(MemoryFault, match=r"updates 4 bytes at `a tensor \(9,\)` \+ 40, 8 bytes past"):
            count_each_kernel[(2,)](table, 8)

    def test_uninitialised_memory_is_filled() -> None:
        x = torch.zeros(3)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            for fresh in (
                torch.empty(5, dtype=dtype),
                torch.empty_like(x),
                x.new_empty(5),
                torch.empty_strided((3,), (2,)),
            ):
                assert fresh.isnan().all()
        assert (torch.empty(5, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
