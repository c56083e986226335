"""The metric names of `run.metric_names=trl` are those that the installed TRL logs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rlkernel.training.metric_names import SUMS, TRL


def test_the_names_are_in_the_source_of_its_trainers() -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0]).glob("trainer/*_trainer.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    of_transformers = {"loss", "grad_norm", "learning_rate"}
    for name in [*TRL.values(), *SUMS["trl"]]:
        name = name.split("/", 1)[1]
        assert name in of_transformers or f'["{name}"]' in source, name
