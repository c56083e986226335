"""pytest fixture `assert_aligned`: fails a test with the verdict if two sides are not aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlkernel_drift.verdict import Verdict


@pytest.fixture
def assert_aligned() -> Callable[..., Verdict]:
    """A function with the arguments of `rlkernel_drift.compare` that returns the verdict or fails the test with it."""

    def check(*args: Any, **kwargs: Any) -> Verdict:
        __tracebackhide__ = True
        from rlkernel_drift.compare import compare
        from rlkernel_drift.errors import DriftError
        from rlkernel_drift.output import write_markdown

        try:
            verdict = compare(*args, **kwargs)
        except DriftError as error:
            pytest.fail(f"unusable input: {error}", pytrace=False)
        if verdict.exit_code != 0:
            pytest.fail(write_markdown(verdict), pytrace=False)
        return verdict

    return check
