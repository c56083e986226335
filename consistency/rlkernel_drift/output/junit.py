"""The verdict as JUnit XML: a test case a gate, so that CI systems show the ladder."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rlkernel_drift.verdict import Status, Verdict

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(verdict: Verdict) -> str:
    """XML text; a failed gate is a failure, an unusable input an error, a gate without evidence is skipped."""
    gates = verdict.gates
    failed = sum(g.status == "failed" for g in gates)
    quiet = sum(g.status in ("skipped", "not reached") for g in gates)
    errors = int(verdict.status in (Status.UNUSABLE, Status.INCONCLUSIVE))
    suite = ElementTree.Element(
        "testsuite",
        name="rlkernel-drift",
        tests=str(len(gates) + 1),
        failures=str(failed),
        errors=str(errors),
        skipped=str(quiet),
    )
    for gate in gates:
        case = ElementTree.SubElement(suite, "testcase", classname="rlkernel-drift", name=gate.title)
        if gate.status == "failed":
            body = ElementTree.SubElement(case, "failure", message=_clean(gate.summary))
            body.text = "\n".join(_clean(f.message + (f"\n  fix: {f.fix}" if f.fix else "")) for f in gate.findings)
        elif gate.status in ("skipped", "not reached"):
            ElementTree.SubElement(case, "skipped", message=_clean(gate.summary))
    case = ElementTree.SubElement(suite, "testcase", classname="rlkernel-drift", name="verdict")
    if errors:
        ElementTree.SubElement(case, "error", message=_clean(verdict.headline))
    ElementTree.SubElement(case, "system-out").text = _clean(verdict.headline)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
