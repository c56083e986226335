"""`rlkernel_vllm.LLM`: vLLM's class with the plugin's settings as arguments."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from rlkernel_vllm import settings
from rlkernel_vllm.settings import ATTENTION, FLAG, LEAVES, MODE, REFUSAL

if TYPE_CHECKING:
    from rlkernel_vllm.config import UnsupportedError


class LLM(vllm.LLM):
    """`vllm.LLM` that takes `use_rl_kernel_backend`.

    Args:
        use_rl_kernel_backend: whether the engine computes with rlkernel's ops; None: as `additional_config` or the
            environment set it. The same holds for the three below.
        rl_kernel_mode: "strict": a setting that cannot be exact is an error; "audit": it is reported.
        rl_kernel_attention: variant of the attention order, "split" or "fa3", the same as in the trainer.
        tp_leaves: chunks of K in row-parallel layers, 1, 2, 4 or 8, the same as in the trainer; a multiple of
            `tensor_parallel_size`.
        Everything else: as in `vllm.LLM`.

    Raises:
        UnsupportedError: strict mode, and a setting or a module of the model cannot be exact; the message names all.
        InactiveError: vLLM did not load the plugin (see `VLLM_PLUGINS`).
        ValueError: an argument is unknown, or `additional_config` has another value.
    """

    def __init__(
        self,
        *args: Any,
        use_rl_kernel_backend: bool | None = None,
        rl_kernel_mode: str | None = None,
        rl_kernel_attention: str | None = None,
        tp_leaves: int | None = None,
        additional_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            FLAG: use_rl_kernel_backend,
            MODE: rl_kernel_mode,
            ATTENTION: rl_kernel_attention,
            LEAVES: tp_leaves,
        }
        requested = settings.merged(additional_config, given)
        if not settings.of(requested).enabled:
            super().__init__(*args, additional_config=requested, **kwargs)
            return
        with _unwrapped_errors():
            super().__init__(*args, additional_config=requested, **kwargs)
        from rlkernel_vllm.report import assert_active

        assert_active(self)


@contextlib.contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raises our UnsupportedError in place of the error in which vLLM wraps it.

    A worker in another process ends as a RuntimeError without a cause, so it writes the message to a file first.
    """
    with tempfile.TemporaryDirectory() as folder:
        refusal = Path(folder) / "refusal"
        os.environ[REFUSAL] = str(refusal)
        try:
            yield
        except ValueError as error:
            found = _unsupported(error)
            if found is None:
                raise
            raise found from None
        except RuntimeError as error:
            if not refusal.exists():
                raise
            from rlkernel_vllm.config import UnsupportedError

            raise UnsupportedError(refusal.read_text()) from error
        finally:
            os.environ.pop(REFUSAL, None)


def _unsupported(error: ValueError) -> UnsupportedError | None:
    """Our error inside pydantic's, which wraps every error of a configuration check."""
    from rlkernel_vllm.config import UnsupportedError

    for entry in error.errors() if hasattr(error, "errors") else ():
        found = entry.get("ctx", {}).get("error")
        if isinstance(found, UnsupportedError):
            return found
    return None
