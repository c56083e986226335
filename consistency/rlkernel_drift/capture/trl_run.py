"""Capture from a TRL run: log-probabilities of the rollout, and those of the update's own forward.

`record(trainer, folder)` before `trainer.train()` writes both sides as capsules every few steps, and a line of metrics.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Manifest, Model, Sampling, Weights, build_capsule, write_capsule
from rlkernel_drift.capsule.folder import COUNT, rank_folder
from rlkernel_drift.capture.request import hardware, versions
from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs.run_folder import step_folders
from rlkernel_drift.statistics import Comparable, token_statistics

METRICS = "metrics.jsonl"
_SAMPLED = ("sampling_per_token_logps", "rl_kernel_sampled")
_VERSION = "rlkernel_drift_version"

logger = logging.getLogger("rlkernel_drift")


def record(trainer: Any, folder: str | Path, *, every: int = 1, keep: int = 20, text: bool = True) -> None:
    """Makes a GRPO or RLOO trainer write capsules of its steps.

    Only tokens sampled with the weights of the step are recorded, because later updates on the same generation are
    off-policy by design. In distributed runs each process writes its own sequences, and a step is read as one capsule;
    the metrics are those of the first process.

    Args:
        trainer: TRL's GRPOTrainer or a subclass.
        folder: receives `step-000012/rollout`, `step-000012/train` and `metrics.jsonl`; may be of an earlier run.
        every: steps between captures.
        keep: number of captures whose capsules are kept.
        text: False leaves out token texts and the command.

    Raises:
        DriftError: the trainer has no log-probabilities of its rollouts to record.
    """
    missing = [n for n in ("_compute_loss", "_get_per_token_logps_and_entropies") if not hasattr(trainer, n)]
    if missing:
        raise DriftError(f"{type(trainer).__name__} has no {', '.join(missing)}; expected TRL's GRPOTrainer")
    if every < 1 or keep < 1:
        raise DriftError(f"every is {every} and keep is {keep}; both must be at least 1")
    trainer.add_callback(_callback(_Run(trainer, Path(folder), every, keep, text)))


class _Run:
    """Sequences of the current step, and where they are written."""

    def __init__(self, trainer: Any, folder: Path, every: int, keep: int, text: bool) -> None:
        self.trainer, self.folder, self.every, self.keep, self.text = trainer, folder, every, keep, text
        self.inputs: dict[str, Any] | None = None
        self.rows: list[dict[str, list[Any]]] = []
        self.warned = False
        loss, score = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
        generate = trainer._generate_and_score_completions

        @wraps(generate)
        def generate_and_score(inputs: Any) -> Any:
            output = generate(inputs)
            ids = output["completion_ids"]
            output[_VERSION] = torch.full((ids.shape[0],), self.step, device=ids.device)
            return output

        @wraps(loss)
        def compute_loss(model: Any, inputs: dict[str, Any]) -> Any:
            self.inputs = inputs if trainer.model.training and self.step % self.every == 0 else None
            try:
                return loss(model, inputs)
            finally:
                self.inputs = None

        @wraps(score)
        def per_token(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = score(model, *args, **kwargs)
            if self.inputs is not None:
                self.take(self.inputs, result[0].detach())
            return result

        trainer._generate_and_score_completions = generate_and_score
        trainer._compute_loss, trainer._get_per_token_logps_and_entropies = compute_loss, per_token

    @property
    def step(self) -> int:
        """Updates so far, which is the version of the weights."""
        return int(self.trainer.state.global_step)

    def take(self, inputs: dict[str, Any], trained: Tensor) -> None:
        """Keeps a micro-batch without its padding: prompts, completions, masks, log-probabilities of both sides."""
        sampled = next((inputs[name] for name in _SAMPLED if inputs.get(name) is not None), None)
        if sampled is None:
            if not self.warned:
                logger.warning("rlkernel-drift: the rollout returns no log-probabilities; use_vllm=True does")
            self.warned = True
            return
        counted = inputs["completion_mask"].bool().cpu()
        mask = counted & inputs["tool_mask"].bool().cpu() if "tool_mask" in inputs else counted
        prompts, present = inputs["prompt_ids"].cpu(), inputs["prompt_mask"].bool().cpu()
        columns = {
            "completion": inputs["completion_ids"].cpu(),
            "mask": mask,
            "rollout": sampled.float().cpu(),
            "train": trained.float().cpu(),
        }
        current = (inputs[_VERSION] == self.step).cpu()
        for i in (current & counted.any(1)).nonzero()[:, 0].tolist():
            width = int(counted[i].nonzero()[-1]) + 1
            row = {name: column[i][:width].tolist() for name, column in columns.items()}
            self.rows.append({"prompt": prompts[i][present[i]].tolist(), **row})

    def write(self) -> None:
        """Writes the step's capsules and its line of metrics."""
        rows, self.rows = self.rows, []
        if not rows:
            return
        place = self.folder / f"step-{self.step:06d}"
        rollout, train = (self._capsule(rows, side) for side in ("rollout", "train"))
        process = self.trainer.accelerator
        for side, capsule in (("rollout", rollout), ("train", train)):
            folder = rank_folder(place / side, process.process_index) if process.num_processes > 1 else place / side
            write_capsule(capsule, folder, text=self.text)
        if not process.is_main_process:
            return
        found = token_statistics(
            Comparable(rollout.logprobs["recorded.processed"], train.logprobs["train.processed"], rollout.mask)
        )
        row = {
            "step": self.step,
            "weights_version": self.step,
            "sampling/sampling_logp_difference/mean": found.mean,
            "sampling/sampling_logp_difference/max": found.maximum,
            "sampling/importance_sampling_ratio/mean": found.ratio_mean,
            "exact_frac": found.equal,
        }
        with open(self.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for old in step_folders(self.folder)[: -self.keep]:
            shutil.rmtree(old)

    def _capsule(self, rows: list[dict[str, list[Any]]], side: Literal["rollout", "train"]) -> Capsule:
        stream = "recorded.processed" if side == "rollout" else "train.processed"
        return build_capsule(
            self._manifest(side, sorted({i for row in rows for i in row["prompt"] + row["completion"]})),
            [row["prompt"] for row in rows],
            [row["completion"] for row in rows],
            {stream: [row[side] for row in rows]},
            masks=[row["mask"] for row in rows],
            sequence_ids=list(range(len(rows))),
        )

    def _manifest(self, side: Literal["rollout", "train"], ids: list[int]) -> Manifest:
        trainer, s = self.trainer, self.trainer.args
        ours = getattr(trainer, "_rl_kernel", None) is not None
        model = trainer.accelerator.unwrap_model(trainer.model)
        config = model.config
        # TRL's forward applies the temperature but does not know which tokens sampling kept; rlkernel's does
        known = side == "rollout" or ours
        sampling = Sampling(
            temperature=float(s.temperature),
            top_k=int(max(0, s.top_k or 0)) if known else 0,
            top_p=float(1.0 if s.top_p is None else s.top_p) if known else 1.0,
            min_p=float(s.min_p or 0.0) if known else 0.0,
        )
        elsewhere = getattr(s, "use_vllm", False) or getattr(trainer, "rollout_func", None) is not None
        settings: dict[str, str | int | float | bool | None] = {
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")
        }
        if side == "train":
            settings["attention_backend"] = "rlkernel" if ours else getattr(config, "_attn_implementation", None)
        else:
            settings["vllm_mode"] = s.vllm_mode if getattr(s, "use_vllm", False) else None
        if trainer.accelerator.num_processes > 1:
            settings[COUNT] = trainer.accelerator.num_processes
        return Manifest(
            side=side,
            engine=("vllm, by TRL" if getattr(s, "use_vllm", False) else "TRL") if side == "rollout" else "TRL",
            step=self.step,
            contract=_contract(model) if ours else None,
            model=Model(
                name=str(getattr(config, "_name_or_path", "")).rstrip("/").rpartition("/")[2],
                family=str(getattr(config, "model_type", "")),
                layers=getattr(config, "num_hidden_layers", None),
                hidden_size=getattr(config, "hidden_size", None),
                vocab_size=getattr(config, "vocab_size", None),
            ),
            # an external engine does not report its weights, and an assumed version would hide a failed transfer
            weights=None if side == "rollout" and elsewhere else Weights(version=self.step),
            sampling=sampling,
            config={key: value for key, value in settings.items() if value is not None},
            versions=versions(),
            hardware=hardware(str(trainer.accelerator.device)),
            command=list(sys.argv),
            vocabulary=_texts(trainer, ids) if self.text else {},
        )


def _contract(model: Any) -> str | None:
    from rlkernel_transformers import status

    return str(status(model).contract)


def _texts(trainer: Any, ids: list[int]) -> dict[str, str]:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return {str(i): str(tokenizer.decode([i], skip_special_tokens=False))[:256] for i in ids}


def _callback(run: _Run) -> Any:
    """A callback that writes after the last backward of a step and before its update."""
    from transformers import TrainerCallback

    class Write(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.write()

    return Write()
