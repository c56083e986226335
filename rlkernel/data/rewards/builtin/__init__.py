"""Built-in rewards: plain functions with the signature of a user's; each judges every completion by itself.

They have no `**columns`, so that a misspelt option is an error.
"""

from __future__ import annotations

_HERE = "rlkernel.data.rewards.builtin"
BUILTIN = {
    "exact_match": f"{_HERE}.text:exact_match",
    "boxed": f"{_HERE}.text:boxed",
    "math": f"{_HERE}.mathematics:math",
    "format": f"{_HERE}.text:format",
    "length": f"{_HERE}.text:length",
    "code": f"{_HERE}.code:code",
}
"""Name of each built-in reward -> its module and function."""
