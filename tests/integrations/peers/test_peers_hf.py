"""transformers' common tests of models after `apply`. Tests that the record lists must fail for its reason.

`RLKERNEL_PEERS=stock` leaves `apply` out, `RLKERNEL_PEERS=record` expects nothing: the two runs of
`benchmarks/test_peers.py`, whose record the table of docs/integrations/compatibility.md is made of.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

if not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    for library in ("transformers", "parameterized"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is missing; make setup-integrations installs it", allow_module_level=True)

import hf_suite

if hf_suite.folder() is None:
    found = f"no test_modeling_common.py of transformers in {hf_suite.FOLDER}; make setup-integrations puts it there"
    if os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
        raise FileNotFoundError(found)
    pytest.skip(found, allow_module_level=True)

RECORD = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "cpu" / "peers-transformers.json"
MODE = os.environ.get("RLKERNEL_PEERS", "")

_failing: dict[str, dict[str, str]] = {}
for row in [] if MODE else json.loads(RECORD.read_text())["rows"]:
    for entry in row.get("note", ()):
        family, _, name = entry.partition("::")
        _failing.setdefault(family, {})[name] = row["reason"]
for _family in hf_suite.FAMILIES:
    globals()[f"Test{_family}"] = hf_suite.suite(_family, MODE != "stock", _failing.get(f"Test{_family}", {}))
