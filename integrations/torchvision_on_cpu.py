"""Lets torchvision be imported with a CPU build of torch: `python integrations/torchvision_on_cpu.py`, once per venv.

torchvision's wheel on PyPI is built for CUDA. Its C++ operators do not load without it, and its import then fails where
it describes two of them. Qwen's processors use none, so declaring the two is enough.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

MARK = '@torch.library.register_fake("torchvision::nms")'
DECLARED = """if not torchvision.extension._has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


"""


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed; pip install torchvision")
    file = Path(spec.origin).parent / "_meta_registrations.py"
    text = file.read_text(encoding="utf-8")
    if DECLARED in text:
        return
    if text.count(MARK) != 1:
        raise SystemExit(f"{file}: this version of torchvision is not known; use the one in the Makefile")
    file.write_text(text.replace(MARK, DECLARED + MARK), encoding="utf-8")


if __name__ == "__main__":
    main()
