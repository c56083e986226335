"""Records the operators of a vLLM worker: fingerprints of rows in any mode, or values in eager mode.

vLLM imports this in its workers: `worker_extension_cls="rlkernel_drift.capture.vllm_worker.Recording"`, with
`additional_config={"rlkernel_drift": "fingerprint"}` (or "values"). Without that key nothing is hooked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.capture.recorder import KINDS, Recorder

KEY = "rlkernel_drift"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_recorder: Recorder | None = None


# ---- recording -----------------------------------------------------------------------------------------------------


def _see_op(value: Tensor, residual: Tensor | None, name: str) -> Tensor:
    if _recorder is not None:
        _recorder.see(name, value, residual)
    return value.clone()


def _define_op() -> None:
    # under torch.compile the recording is a custom op whose result the model uses, so that it is not eliminated
    library = torch.library.Library(KEY, "FRAGMENT")
    library.define("see(Tensor value, Tensor? residual, str name) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl("see", _see_op, key)
    torch.library.register_fake(f"{KEY}::see", lambda value, residual, name: torch.empty_like(value), lib=library)
    globals()["_library"] = library


# ---- hooks ---------------------------------------------------------------------------------------------------------


def _seen(name: str, value: Tensor, residual: Tensor | None = None) -> Tensor:
    """Records a value; returns the one that the model continues with."""
    if torch.compiler.is_compiling():
        return torch.ops.rlkernel_drift.see(value, residual, name)
    assert _recorder is not None
    _recorder.see(name, value, residual)
    return value


def _output(name: str, residual: str | None = None, add: str | None = None) -> Any:
    """A hook that records a module's output.

    Args:
        name: of the output, or of its first part.
        residual: name of the second part, where a norm returns the residual stream.
        add: name of the sum of both parts, which is then the only one recorded.
    """

    def hook(module: Any, args: Any, out: Any) -> Any:
        if not isinstance(out, tuple):
            return _seen(name, out)
        first, second = out
        if add is not None:
            return _seen(add, first, second), second
        return _seen(name, first), second if residual is None else _seen(residual, second)

    return hook


def _input(name: str) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> Any:
        return (_seen(name, args[0]), *args[1:])

    return hook


def attach(model: Any, recorder: Recorder) -> None:
    """Hooks a vLLM decoder: its inputs, embedding, layers with fused projections, final norm.

    Raises:
        ValueError: the model has no list of layers.
    """
    base: Any = getattr(model, "model", None)
    if getattr(base, "layers", None) is None:
        raise ValueError(f"{type(model).__name__} has no list of layers; its operators cannot be recorded")

    def tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(("input_ids", "positions"), args, strict=False)), **kwargs}
        if given.get("input_ids") is not None:
            recorder.see_tokens(given["input_ids"], given["positions"])

    model.register_forward_pre_hook(tokens, with_kwargs=True)
    base.embed_tokens.register_forward_hook(_output("embedding"))
    for i, layer in enumerate(base.layers):
        if not hasattr(layer, "self_attn"):
            continue
        at = f"layers.{i}."
        layer.input_layernorm.register_forward_hook(_output(f"{at}input_norm"))
        layer.post_attention_layernorm.register_forward_hook(_output(f"{at}post_norm", f"{at}attention_residual"))
        for owner, fused in ((layer.self_attn, "qkv_proj"), (layer.mlp, "gate_up_proj")):
            module = getattr(owner, fused)
            recorder.splits[at + fused] = (
                tuple(at + part for part in _FUSED[fused]), list(module.output_partition_sizes)
            )  # fmt: skip
            module.register_forward_hook(_output(at + fused))
        for norm in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, norm):
                getattr(layer.self_attn, norm).register_forward_hook(_output(at + norm))
        layer.self_attn.o_proj.register_forward_pre_hook(_input(f"{at}attention"))
        layer.self_attn.o_proj.register_forward_hook(_output(f"{at}o_proj"))
        layer.mlp.down_proj.register_forward_pre_hook(_input(f"{at}activation"))
        layer.mlp.down_proj.register_forward_hook(_output(f"{at}down_proj"))
        layer.register_forward_hook(_output("", add=f"{at}output"))
    base.norm.register_forward_hook(_output("final_norm"))


def install() -> None:
    """Makes workers of this process attach hooks after they load a model, before it is compiled."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stock = WorkerWrapperBase.init_device
    if getattr(stock, KEY, False):
        return
    _define_op()

    @wraps(stock)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = (getattr(self.vllm_config, "additional_config", None) or {}).get(KEY)
        if kind is not None:
            _watch(self.worker, self.vllm_config, kind)
        return stock(self, *args, **kwargs)

    setattr(init_device, KEY, True)
    WorkerWrapperBase.init_device = init_device


def _watch(worker: Any, vllm_config: Any, kind: str) -> None:
    global _recorder
    if kind not in KINDS:
        raise ValueError(f"additional_config[{KEY!r}] is {kind!r}; expected one of {', '.join(KINDS)}")
    if kind == "values" and not vllm_config.model_config.enforce_eager:
        raise ValueError("values of operators need enforce_eager; compiled engines record fingerprints")
    recorder = _recorder = Recorder(kind, vllm_config.scheduler_config.max_num_batched_tokens)
    load, execute = worker.load_model, worker.execute_model

    @wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        done = load(*args, **kwargs)
        attach(worker.model_runner.get_model(), recorder)
        return done

    @wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        done = execute(scheduler_output, *args, **kwargs)
        counts = scheduler_output.num_scheduled_tokens
        if recorder.on and counts:
            recorder.keep(_order(worker.model_runner, counts), counts)
        return done

    worker.load_model, worker.execute_model = load_model, execute_model


def _order(runner: Any, counts: dict[str, int]) -> list[str]:
    """Requests in the order of their rows, which vLLM's two model runners store in different places."""
    state = getattr(runner, "execute_model_state", None)
    held = [getattr(runner, "input_batch", None), getattr(state, "input_batch", None)]
    held += state if isinstance(state, tuple) else []
    for batch in held:
        found = [r for r in getattr(batch, "req_ids", None) or () if r in counts]
        if len(found) == len(counts):
            return found
    return sorted(counts, key=counts.__getitem__)


def hf_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights under their Hugging Face names; fused ones are split, padding of the vocabulary is removed."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        prefix, _, last = owner.rpartition(".")
        weight, module = parameter.data, modules[owner]
        if last in _FUSED and weight.numel():
            rows = weight.split(list(module.output_partition_sizes))
            yield from ((f"{prefix}.{part}.{leaf}", row) for part, row in zip(_FUSED[last], rows, strict=True))
        else:
            yield name, weight[: getattr(module, "org_vocab_size", len(weight))]


# ---- calls ---------------------------------------------------------------------------------------------------------


class Recording:
    """Worker methods that `collective_rpc` calls by name."""

    model_runner: Any

    def rlkernel_drift_start(self, sequences: int) -> None:
        """Keeps rows of the next `sequences` requests."""
        if _recorder is not None:
            _recorder.start(sequences)

    def rlkernel_drift_save(self, path: str) -> list[str]:
        """Writes the kept rows and stops recording; returns the names of the tensors."""
        if _recorder is None:
            return []
        _recorder.on = False
        return _recorder.save(path)

    def rlkernel_drift_weights(self) -> dict[str, dict[str, Any]] | None:
        """Fingerprints of the weights in memory; None where the engine repacks them."""
        from rlkernel_drift.scoring.weights import fingerprints

        weights = dict(hf_weights(self.model_runner.get_model()))
        if any(weight.numel() == 0 for weight in weights.values()):
            return None
        return {name: found.model_dump() for name, found in fingerprints(weights).items()}

    def rlkernel_drift_about(self) -> dict[str, str]:
        """The attention backend and model class in use, which the configuration may leave to defaults."""
        model = self.model_runner.get_model()
        kinds = {type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl") and hasattr(m, "attn_backend")}
        return {"attention_backend": ", ".join(sorted(kinds)), "model_class": type(model).__name__}


install()
