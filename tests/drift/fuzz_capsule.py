"""atheris target of the capsule reader: any bytes give a capsule or a named refusal, nothing else.

`python tests/drift/fuzz_capsule.py -max_total_time=60` runs it where atheris is installed; `test_drift_fuzz.py` feeds
it the bytes of hypothesis, and runs a short atheris session where it can.
"""

from __future__ import annotations

import sys

from rlkernel_drift.capsule.folder import assemble, parse_manifest
from rlkernel_drift.capsule.tensor_file import Limits, parse_tensors
from rlkernel_drift.errors import CapsuleError

READER = {
    "capsule.folder": ("assemble", "parse_manifest"),
    "capsule.tensor_file": ("parse_tensors",),
    "errors": ("CapsuleError",),
}
SMALL = Limits(file_bytes=1 << 20, header_bytes=1 << 16, json_bytes=1 << 16, tensors=64, tokens=1 << 12)


def read_anything(data: bytes) -> str:
    """Feeds bytes to the manifest and tensor readers; returns the outcome."""
    cut = data.find(b"\0\0SPLIT\0\0")
    manifest, tensors = (data[:cut], data[cut + 9 :]) if cut >= 0 else (data, data)
    outcome = []
    for read in (lambda: parse_manifest(manifest, SMALL), lambda: parse_tensors(tensors, "fuzz", SMALL)):
        try:
            read()
            outcome.append("read")
        except CapsuleError as error:
            outcome.append(error.refusal.value)
    if outcome == ["read", "read"]:
        try:
            assemble(parse_manifest(manifest, SMALL), parse_tensors(tensors, "fuzz", SMALL), {}, SMALL)
        except CapsuleError as error:
            outcome.append(error.refusal.value)
    return " ".join(outcome)


def main() -> None:
    import importlib

    import atheris

    # The reader's own branches guide the search; those of numpy and pydantic take a minute to instrument.
    with atheris.instrument_imports(include=["rlkernel_drift"]):
        for name in [name for name in sys.modules if name.startswith("rlkernel_drift")]:
            del sys.modules[name]
        for name, parts in READER.items():
            module = importlib.import_module(f"rlkernel_drift.{name}")
            globals().update({part: getattr(module, part) for part in parts})
    atheris.Setup(sys.argv, read_anything)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
