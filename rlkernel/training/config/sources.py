"""Where settings come from, and which source wins.

Later sources win: the library's defaults, the algorithm's, the built-in task's, the method's, the config file,
command-line options, overrides `a.b=value`. `resolve` merges them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlkernel.data.errors import InputError
from rlkernel.parallel.torchrun import is_launched
from rlkernel.training.config.methods import DEFAULTS, METHODS
from rlkernel.training.config.sections import RewardSettings
from rlkernel.training.config.settings import Settings

LEAVES_OF_RANKS = 8
"""Default of `train.leaves` under torchrun, so that the number of ranks does not decide the bits."""
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: `!!int x`; RecursionError: nested brackets


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def dotted_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every setting, in order; `rewards` is one key."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from dotted_keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def nearest(key: str) -> str | None:
    """The existing dotted key most like `key`: by its whole path, else by its last part."""
    keys = [name for name, _ in dotted_keys()]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(keys)}
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    close_last = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last), n=1, cutoff=0.7)
    return close[0] if close else by_last[close_last[0]] if close_last else None


def flatten(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Dotted keys of nested (or already dotted) settings, such as `{"optimizer.lr": 1e-5}`.

    Raises:
        InputError: an unknown key, with the nearest existing one; the message begins with `source`.
    """
    flat = dict(leaves(values))
    known = [name for name, _ in dotted_keys()]
    for key in flat:
        if not any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in known):
            raise InputError(f"{source}: {_unknown(key, nearest(key))}")
    return flat


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unknown(key: str, guess: str | None) -> str:
    hint = f"did you mean {guess}?" if guess else "--dry-run prints every setting"
    return f"unknown setting {key!r}; {hint}"


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = nested
        for i, name in enumerate(sections, 1):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"setting {'.'.join(sections[:i])} is a value; {key!r} cannot be set inside it")
        place[last] = value
    return nested


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted settings of words `a.b=value`, whose values are YAML (`[1, 2]`, `null`, `true`, `1e-3`).

    Raises:
        InputError: a word without `=`, an unknown key, or a value that is not YAML.
    """
    flat: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise InputError(f"override {word!r}: expected key=value with a dotted key, such as optimizer.lr=1e-5")
        if not text.strip():
            raise InputError(f"override {word!r}: the value is empty; write null for none")
        try:
            value = yaml.safe_load(text)  # YAML reads 1e-3 as text, which pydantic converts
        except _NOT_YAML as error:
            raise InputError(f"override {word!r}: the value is not YAML ({' '.join(str(error).split())})") from None
        flat |= flatten({key: value}, f"override {word!r}")
    return flat


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Dotted settings of a YAML config file.

    Raises:
        InputError: the file is unreadable, not YAML or not a mapping, or has an unknown key.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except _NOT_YAML as error:
        raise InputError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise InputError(f"config: {path} must hold a mapping of settings, got {type(loaded).__name__}")
    return flatten(loaded or {}, f"config {path}")


def _describe(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":  # in an entry of `rewards`: `flatten` has checked the other keys
            entry, _, name = key.rpartition(".")
            close = difflib.get_close_matches(name, list(RewardSettings.model_fields), n=1)
            lines.append(_unknown(key, f"{entry}.{close[0]}" if close else None))
        elif key:
            lines.append(f"setting {key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}")
        else:
            lines.append(message)
    return "; ".join(lines)


def resolve(
    algorithm: str,
    *,
    file: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """Settings of a run.

    Args:
        algorithm: "grpo", "ppo", "sft", "dpo" or "reward".
        file: YAML config file.
        options: dotted keys from command-line options; None values are left out.
        overrides: words `a.b=value`.

    Raises:
        InputError: names the setting, what was expected and what to do.
    """
    flat = {} if file is None else load_yaml(file)
    flat |= flatten({key: value for key, value in (options or {}).items() if value is not None}, "options")
    flat |= parse_overrides(overrides)
    if flat.setdefault("algorithm", algorithm) != algorithm:
        wanted = flat["algorithm"]
        raise InputError(
            f"config: algorithm is {wanted!r}, the command trains {algorithm!r}; use `rlkernel train {wanted}`"
        )
    given = [flat.get(key) for key in ("data.task", "data.train", "model.path")]
    if given == [None] * 3 and not flat.get("rewards"):
        # Without any data the built-in task runs; a model or a reward alone means that the data were forgotten.
        flat["data.task"] = "arithmetic"
    task = {} if flat.get("data.task") is None else _task_defaults(str(flat["data.task"]), algorithm)
    ranks = {"train.leaves": LEAVES_OF_RANKS} if is_launched() else {}
    flat = {**DEFAULTS.get(algorithm, {}), **ranks, **task, **METHODS.get(flat.get("method"), {}), **flat}
    try:
        return Settings.model_validate(_nest(flat))
    except ValidationError as error:
        raise InputError(_describe(error)) from None


def _task_defaults(name: str, algorithm: str) -> dict[str, Any]:
    from rlkernel.data.tasks import load_task

    try:
        defaults = load_task(name).defaults(algorithm)
    except ValueError as error:
        raise InputError(f"setting data.task: {error}") from None
    if algorithm == "sft":
        # Supervised training of a built-in task uses its warm-up's settings, because the others are for rollouts.
        renamed = {
            "warmup.lr": "optimizer.lr",
            "warmup.steps": "train.steps",
            "warmup.batch_size": "train.batch_size",
            "warmup.examples": "warmup.examples",
        }
        return {renamed[key]: value for key, value in defaults.items() if key in renamed}
    return defaults


def located(settings: Settings) -> Settings:
    """The settings with absolute paths, so that they mean the same files from any working directory.

    Functions given as a module stay as they are, and so does a `model.path` that does not exist here, because it may be
    a hub name.
    """
    settings = settings.model_copy(deep=True)
    for model in (settings.model, settings.value):
        if model.path is not None and Path(model.path).exists():
            model.path = str(Path(model.path).absolute())
    for section, name in ((settings.data, "train"), (settings.data, "heldout"), (settings.warmup, "data")):
        value = getattr(section, name)
        if value is not None:
            setattr(section, name, str(Path(value).absolute()))
    if settings.run.output is not None:
        settings.run.output = str(Path(settings.run.output).absolute())
    for reward in settings.rewards:
        if reward.model is not None and Path(reward.model).exists():
            reward.model = str(Path(reward.model).absolute())
        reward.function = _located(reward.function)
    settings.rollout.environment = _located(settings.rollout.environment)
    return settings


def _located(reference: str | None) -> str | None:
    """A reference to a function with the absolute path of its file, if it names one."""
    file, _, function = (reference or "").rpartition(":")
    return f"{Path(file).absolute()}:{function}" if file.endswith(".py") else reference


def to_yaml(settings: Settings) -> str:
    """The resolved settings as YAML that `--config` reads back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
