"""The plugin's hooks in vLLM. They only read a flag unless an engine requests rlkernel.

Two are set in every process: where vLLM checks a configuration, and where it has created a worker. Everything else
changes objects in the worker of an engine that requested it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

from rlkernel_vllm import settings

_installed = False


def install() -> None:
    """Sets the hooks, once per process. Initializes no device and starts no thread.

    vLLM starts no engine if a plugin raises, so hooks that do not fit are an error only where rlkernel is requested.
    """
    global _installed
    if _installed:
        return
    _installed = True
    try:
        _hook_config()
        _hook_workers()
        _register_attention()
    except Exception as error:
        settings.hook_error = f"{type(error).__name__}: {error}"
        if settings.of({}).enabled:
            raise
        logging.getLogger("rlkernel_vllm").warning(
            "the plugin does not fit this vLLM and is off: %s", settings.hook_error
        )


def _hook_config() -> None:
    """Hooks `check_and_update_config`, which runs while a `VllmConfig` is created, in the front end and the engine."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    stock = platform.check_and_update_config.__func__

    @wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        requested = settings.read(vllm_config)
        if requested.enabled and vllm_config.model_config is not None:
            from rlkernel_vllm.config import prepare

            prepare(vllm_config, requested)
            _hook_requests()
        stock(cls, vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _hook_requests() -> None:
    """Hooks `process_inputs`, which accepts a request: a VLLMValidationError there fails only that request.

    Set only once an engine has requested rlkernel.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    stock = InputProcessor.process_inputs
    if getattr(stock, "rlkernel", False):
        return

    @wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        requested = settings.read(self.vllm_config)
        if requested.enabled and requested.mode == "strict":
            from rlkernel_vllm.config import request_problem

            why = request_problem(params)
            if why:
                raise VLLMValidationError(why, parameter="structured_outputs")
        return stock(self, request_id, prompt, params, *args, **kwargs)

    process_inputs.rlkernel = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def _hook_workers() -> None:
    """Hooks `init_device`, which follows the creation of a worker, after its process has loaded the plugins."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stock = WorkerWrapperBase.init_device

    @wraps(stock)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        requested = settings.read(self.vllm_config)
        if requested.enabled:
            _attach(self.worker, self.vllm_config)
        return stock(self, *args, **kwargs)

    WorkerWrapperBase.init_device = init_device


def _attach(worker: Any, vllm_config: Any) -> None:
    """Wraps the worker's `load_model`, and adds the methods that `collective_rpc` calls by name."""
    from rlkernel_vllm import fingerprint, report, warmup
    from rlkernel_vllm.config import UnsupportedError

    _hook_models()
    stock = worker.load_model

    @wraps(stock)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        try:
            done = stock(*args, **kwargs)
            runner = worker.model_runner
            replace_sampler(runner, settings.read(vllm_config))
        except UnsupportedError as error:
            refusal = os.environ.get(settings.REFUSAL)  # `rlkernel_vllm.LLM` reads it, maybe in another process
            if refusal:
                with contextlib.suppress(OSError):  # the file is on another host, or its `LLM` call has ended
                    Path(refusal).write_text(str(error))
            raise
        warmup.certify(runner.get_model(), vllm_config)
        return done

    worker.load_model = load_model
    worker.rlkernel_status = MethodType(report.of_worker, worker)
    worker.rlkernel_fingerprints = MethodType(fingerprint.of_worker, worker)
    worker.rlkernel_confirm = MethodType(fingerprint.confirm, worker)


def replace_sampler(runner: Any, requested: settings.Settings) -> None:
    """Replaces the sampler of a runner whose model is loaded, and its worker for prompt log-probabilities.

    Raises:
        UnsupportedError: strict mode, and the sampler is not vLLM's own.
    """
    from rlkernel_vllm.config import Finding, refuse

    if hasattr(runner, "prompt_logprobs_worker"):
        from rlkernel_vllm import sampling_v2 as sampling
    else:
        from rlkernel_vllm import sampling_v1 as sampling  # type: ignore[no-redef]
    if not sampling.replace_sampler(runner):
        found: list[Finding] = runner.get_model().rlkernel.findings
        found.append(Finding("sampler", f"{type(runner.sampler).__name__}; expected vLLM's own"))
        refuse(found, requested)


def _hook_models() -> None:
    """Hooks `initialize_model`, which builds the modules before weights are loaded; loaders import it by name."""
    from vllm.model_executor.model_loader import utils

    stock = utils.initialize_model
    if getattr(stock, "rlkernel", False):
        return

    outer = [False]  # a vision-language model builds its text model by the same function, and is converted as one

    @wraps(stock)
    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        requested = settings.read(vllm_config)
        if not requested.enabled or outer[0]:
            return stock(*args, **kwargs)
        from rlkernel_vllm.convert import convert, own_rope_cache

        outer[0] = True
        try:
            with own_rope_cache():
                model = stock(*args, **kwargs)
        finally:
            outer[0] = False
        convert(model, vllm_config, requested)
        return model

    initialize_model.rlkernel = True  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("initialize_model") is stock:
            vars(module)["initialize_model"] = initialize_model


def _register_attention() -> None:
    """Registers our backend as CUSTOM, vLLM's name for one of a plugin; only `config.prepare` selects it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum, register_backend

    if AttentionBackendEnum.CUSTOM not in _ATTN_OVERRIDES:
        register_backend(AttentionBackendEnum.CUSTOM, settings.BACKEND)
