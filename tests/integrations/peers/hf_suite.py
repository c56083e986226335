"""transformers' own common tests of models, on the four families: on stock models, or on models after `apply`.

The tests come with transformers' source distribution; `make setup-integrations` unpacks its common test files under the
environment's `share`. This repository holds only the tiny configurations that they need.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

FAMILIES = ("Qwen3", "Qwen2", "Llama", "Mistral")
FOLDER = Path(sys.prefix) / "share" / f"transformers-{transformers.__version__}" / "tests"
OTHERS = re.compile(  # tests of other modalities, of encoders, or for accelerators and libraries that are not here
    r"flash|flex|deepspeed|offload|parallel|_features_|vision|(?<!non_)composite|encoder|compile|kernels_|grouped|"
    r"global_device|position_vector|can_load_with_device"
)
REASONS = (  # name and message of tests that may fail, and the reason
    (
        r"output_attentions=True: the attention op keeps no weights",
        "`output_attentions=True` is refused: the attention op keeps no weights",
    ),
    (
        r"`output_attentions` attribute is not supported",
        "transformers lets a configuration ask for attention weights with `eager` attention alone; under `apply` they "
        "are asked for in the call",
    ),
    (
        r"retain_grad\w+: .*unexpectedly None",
        "attention weights are returned without a gradient: the op does not compute them",
    ),
    (
        r"does not support output_attentions",
        "skipped: transformers reads from the signature of a forward whether it returns attention weights",
    ),
    (
        r"(set_attention_dynamically|sdpa_can_dispatch\w+): .*False is not true",
        "the test reads `config._attn_implementation`, which `apply` sets to its own",
    ),
    (r"architectures is \['\w+Model'\]", "a base model's configuration names no `ForCausalLM`, and `apply` refuses it"),
    (
        r"tied_weights_keys: .*Lists differ",
        "the weights of q, k, v (and of gate, up) are views of one buffer, which the test takes for tied weights; "
        "`apply(model, join_weights=False)` leaves them apart",
    ),
    (r"specific_layers_hidden_states: .*3 != 2", "`output_hidden_states` as a list of layers returns all of them"),
    (r"call apply\(model\) again", "layers that are put in after `apply` are refused until it is called again"),
)


def reason(message: str) -> str:
    """Why a test may fail that passes with stock models, by `name: message`.

    Raises:
        KeyError: no reason is known; the test is a defect.
    """
    for pattern, why in REASONS:
        if re.search(pattern, message):
            return why
    raise KeyError(message)


def folder() -> Path | None:
    """Folder of the installed transformers' common test files, or None."""
    found = Path(os.environ.get("RLKERNEL_TRANSFORMERS_TESTS", FOLDER))
    return found if (found / "test_modeling_common.py").exists() else None


def mixins() -> tuple[type, ...]:
    """transformers' common tests of models, and its test of training. Two mixins that the former's module imports are
    not in the source distribution.
    """
    where = folder()
    assert where is not None
    for name in ("", ".exporters", ".generation"):
        package = types.ModuleType("transformers_tests" + name)
        package.__path__ = [str(where)]
        sys.modules.setdefault(package.__name__, package)
    for place, mixin in (("exporters.test_export", "ExportTester"), ("generation.test_utils", "GenerationTester")):
        module = types.ModuleType(f"transformers_tests.{place}")
        setattr(module, f"{mixin}Mixin", type(f"{mixin}Mixin", (), {}))
        sys.modules.setdefault(module.__name__, module)
    common, training = (
        importlib.import_module(f"transformers_tests.{name}")
        for name in ("test_modeling_common", "test_training_mixin")
    )
    return training.TrainingTesterMixin, common.ModelTesterMixin, common.GenerationTesterMixin


class Tester:
    """What the common tests need of a family: a tiny configuration, and inputs for it."""

    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2

    def __init__(self, family: str) -> None:
        self.config_class = getattr(transformers, f"{family}Config")
        self.causal_lm_class = getattr(transformers, f"{family}ForCausalLM")

    def get_config(self) -> Any:
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=40,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            head_dim=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


@contextlib.contextmanager
def applied(model_class: Any) -> Iterator[None]:
    """Calls `apply` on every model of the class that is built or loaded in the block, as a user would."""
    import rlkernel_transformers as rt

    init, load = model_class.__init__, model_class.from_pretrained.__func__
    loading: list[None] = []

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not loading:
            rt.apply(self)

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loading.append(None)
        try:
            found = load(cls, *args, **kwargs)
        finally:
            loading.pop()
        rt.apply(found[0] if isinstance(found, tuple) else found)
        return found

    model_class.__init__, model_class.from_pretrained = __init__, classmethod(from_pretrained)
    try:
        yield
    finally:
        model_class.__init__ = init
        del model_class.from_pretrained


def suite(family: str, apply: bool, failing: dict[str, str]) -> type[unittest.TestCase]:
    """transformers' tests of one family, on stock models or on models after `apply`.

    Args:
        failing: names of tests that must fail or be skipped, and the pattern of the reason.
    """

    class Suite(*mixins(), unittest.TestCase):  # type: ignore[misc]
        model_tester: Any = None
        all_model_classes = (getattr(transformers, f"{family}ForCausalLM"),)

        def setUp(self) -> None:
            torch.manual_seed(0)
            self.model_tester = Tester(family)
            if apply:
                self.enterContext(applied(self.model_tester.causal_lm_class))

        def subTest(self, *_: Any, **__: Any) -> Any:
            return contextlib.nullcontext()  # every failure fails the test

    for name in dir(Suite):
        if name.startswith("test_") and callable(getattr(Suite, name)):
            if OTHERS.search(name):
                setattr(Suite, name, None)
            elif name in failing:
                setattr(Suite, name, _must_fail(getattr(Suite, name), failing[name]))
    Suite.__name__ = Suite.__qualname__ = f"Test{family}"
    return Suite


def _must_fail(test: Any, why: str) -> Any:
    """The test, which passes if it ends with an error or a skip of this reason."""

    @functools.wraps(test)
    def run(self: Any) -> None:
        try:
            test(self)
        except (Exception, unittest.SkipTest) as error:
            assert reason(f"{test.__name__}: {error}") == why, error
        else:
            raise AssertionError(f"it passes, and {STALE}")

    return run


STALE = "the table says that it does not: run `python benchmarks/test_peers.py` and `make docs`, and commit the result"
