"""Variants of attention: selects the one that a call runs, and checks whether this machine supports it.

Contract: orders.py, `attention`. "split" is the default; "fa3" is the order of FlashAttention-3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rlkernel.contract.orders import ATTENTION_SPLIT, contract_id
from rlkernel.kernels.cuda import attention_fa3
from rlkernel.kernels.errors import VariantError
from rlkernel.kernels.switch import Switch
from rlkernel.ops.checks import check

VARIANTS = ("split", "fa3")

_variant = Switch[str | None](None)  # of the process; None if it was not set


def set_attention_variant(variant: str | None) -> None:
    """Sets the variant of every attention call in this process that does not name one; None, the default, is "split".

    A model keeps the variant that was set when it was created and raises while another one is set, so that its rollout
    and training never differ. The call also applies inside open blocks of `attention_variant`.

    Raises:
        ValueError: the name is unknown.
    """
    if variant is not None:
        _known(variant)
    _variant.set(variant)


@contextlib.contextmanager
def attention_variant(variant: str | None) -> Iterator[None]:
    """`set_attention_variant` for a block. If blocks of several threads overlap, the one that began last applies."""
    if variant is not None:
        _known(variant)
    with _variant.block(variant):
        yield


def current_attention_variant(asked: str | None = None) -> str:
    """Variant of an attention call whose argument `variant` is `asked`.

    Raises:
        ValueError: `asked` is unknown. VariantError: the process is set to another one.
    """
    if asked is None:
        return _variant.now or VARIANTS[0]
    _known(asked)
    if (chosen := _variant.now) is not None and chosen != asked:
        raise VariantError(
            f"attention variant {asked!r} was requested in a process that is set to {chosen!r}; a model keeps the "
            f"variant that was set when it was made: call model.set_attention_variant({chosen!r}), or leave the block"
        )
    return asked


def attention_contract(variant: str | None = None) -> str:
    """Contract id of a variant, `rlk-2` or `rlk-2+fa3`; None: the process's variant."""
    variant = current_attention_variant() if variant is None else _known(variant)
    return contract_id() if variant == VARIANTS[0] else contract_id(variant)


def check_attention_variant(
    variant: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int | None = None,
    halves: bool = False,
    window: int | None = None,
) -> None:
    """Raises unless a variant runs on this machine with these tensors; certifies "fa3" if there is no verdict yet.

    Args:
        page_size: tokens per page of the cache; None: no cache, as in training.
        halves: keys and values are the halves of one cache [pages, page, HK, 2 D].

    Raises:
        ValueError: the name is unknown.
        VariantError: FlashAttention-3 is missing, does not support these tensors or a window, or was refused; the
            message says which, and names the first differing element.
    """
    if _known(variant) == VARIANTS[0]:
        return
    check(window is None, lambda: _no_window(window), VariantError)
    index = -1 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
    pages = dict.fromkeys(((attention_fa3.PAGE, False), (page_size or attention_fa3.PAGE, halves)))
    for page, split_cache in pages:
        attention_fa3.require(attention_fa3.FA3Shape(index, dtype, heads, kv_heads, head_dim, page, split_cache))


def _known(variant: str) -> str:
    check(variant in VARIANTS, lambda: f"attention variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
    return variant


def _no_window(window: int | None) -> str:
    return f"attention variant 'fa3' does not support window={window}; use variant 'split'"


def check_fa3_arguments(window: int | None, split: int) -> None:
    check(window is None, lambda: _no_window(window), VariantError)
    check(
        split == ATTENTION_SPLIT,
        lambda: f"attention variant 'fa3' does not support split={split}; leave it out, or use variant 'split'",
        VariantError,
    )
