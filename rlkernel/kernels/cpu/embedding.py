"""embedding on the CPU: launchers of `csrc/cpu/embedding.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import FLOATS, code, function, threads
from rlkernel.kernels.reference.embedding import check_range


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    check_range("embedding", "ids", ids, weight.shape[0], "V (rows of weight)")
    ids, weight = ids.contiguous(), weight.contiguous()
    y = weight.new_empty(ids.shape[0], weight.shape[1])
    function("rlk_embedding", "ppplli")(
        ids.data_ptr(), weight.data_ptr(), y.data_ptr(), y.shape[0], y.shape[1] * y.element_size(), threads()
    )
    return y


def embedding_wgrad_(grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    check_range("embedding", "ids", ids, grad.shape[0], "V (rows of weight)")
    dy, ids = dy.contiguous(), ids.contiguous()
    function("rlk_embedding_wgrad", "pppllii")(
        ids.data_ptr(), dy.data_ptr(), grad.data_ptr(), dy.shape[0], dy.shape[1], code(dy.dtype), threads()
    )


def embedding_wgrad(dy: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    grad = torch.zeros(vocabulary, dy.shape[1], **FLOATS)
    embedding_wgrad_(grad, dy, ids)
    return grad.to(dy.dtype)
