"""manifest.json of a capsule: engine, model, weights and settings of the numbers. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

FORMAT = "rlkernel.trace/1"

Scalar = str | int | float | bool | None
Name = Annotated[str, StringConstraints(max_length=512)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]
_DTYPES = {
    "float32": ("float32", "fp32", "f32", "float"),
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "f16", "half"),
}
TokenId = Annotated[str, StringConstraints(pattern=r"^\d{1,10}$")]
Count = Annotated[int, Field(ge=0, le=1 << 40)]


def dtype_name(value: object) -> str | None:
    """ "float32", "bfloat16" or "float16" for any of their spellings; None for others, such as `auto` and "None"."""
    spelled = str(value).strip().lower().removeprefix("torch.")
    return next((name for name, spellings in _DTYPES.items() if spelled in spellings), None)


class Strict(BaseModel):
    """Base of all parts: frozen, no unknown key, no silent conversion, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Sampling(Strict):
    """Sampling settings; `top_k=0`, `top_p=1`, `min_p=0` keep all tokens."""

    temperature: float = Field(default=1.0, ge=0, le=1e6)
    top_k: int = Field(default=0, ge=0, le=1 << 31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)

    @property
    def filters(self) -> bool:
        """Whether a filter excludes tokens from sampling."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Model(Strict):
    """The network; `tokenizer` and `chat_template` are digests of the files."""

    name: Name = ""
    family: Name = ""
    layers: Count | None = None
    hidden_size: Count | None = None
    vocab_size: Count | None = None
    padded_vocab_size: Count | None = None
    tokenizer: Digest | None = None
    chat_template: Digest | None = None


class WeightFingerprint(Strict):
    """One tensor under its Hugging Face name.

    Attributes:
        digest: of the bytes as stored in `dtype`.
        bf16: of the values rounded to bfloat16, to compare across dtypes.
        norm: Euclidean norm; None if it is not finite.
    """

    dtype: Name
    shape: Annotated[list[Count], Field(max_length=8)]
    digest: Digest
    bf16: Digest | None = None
    norm: float | None = None


class Weights(Strict):
    """Fingerprints of the weights that computed the numbers, and digests of the `previous` version, if known."""

    version: int | Name | None = None
    tensors: Annotated[dict[Name, WeightFingerprint], Field(max_length=65536)] = {}
    previous: Annotated[dict[Name, Digest], Field(max_length=65536)] = {}
    adapter: Name | None = None


class Operator(Strict):
    """One recorded tensor.

    Attributes:
        name: `embedding`, `layers.3.q_proj`, ..., in the order of computation.
        kind: full (every token), rows (the tokens in `operators.rows`) or fingerprint (one int64 per token).
    """

    name: Name
    kind: Literal["full", "rows", "fingerprint"]
    dtype: Name
    width: Count


def layer_of(operator: str) -> int | None:
    """The layer number in an operator's name; None outside the layers."""
    parts = operator.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdigit() else None


class Media(Strict):
    """An image, video or sound: the span of its tokens, and the digest of the model's input."""

    sequence: Count
    begin: Count
    end: Count
    kind: Literal["image", "video", "audio"]
    digest: Digest


class Floor(Strict):
    """Noise of an engine against itself (`rlkernel-drift floor`): |difference| of log-probabilities."""

    mean: float = Field(ge=0)
    p99: float = Field(ge=0)
    maximum: float = Field(ge=0)
    k3: float = 0.0
    tokens: Count = 0
    permutations: list[Name] = []


class File(Strict):
    """Size and digest of a tensor file."""

    bytes: Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Strict):
    """manifest.json.

    Attributes:
        side: role of this stack in the run.
        engine: engine that computed the numbers ("vllm", "hf", "rlkernel", ...).
        config: settings that can change numbers: dtype, attention_backend, tensor_parallel, head_dtype, ...
        vocabulary: texts of the token ids that occur, by id; empty after redaction.
        redacted: texts were left out on purpose.
        left_out: descriptions of parts that were left out.
    """

    format: Literal["rlkernel.trace/1"] = "rlkernel.trace/1"
    side: Literal["rollout", "train", "other"] = "other"
    engine: Name = ""
    step: Count | None = None
    contract: Name | None = None
    model: Model = Model()
    weights: Weights | None = None
    sampling: Sampling = Sampling()
    config: Annotated[dict[Name, Scalar], Field(max_length=4096)] = {}
    versions: Annotated[dict[Name, Name], Field(max_length=1024)] = {}
    hardware: Annotated[dict[Name, Scalar], Field(max_length=256)] = {}
    command: Annotated[list[Annotated[str, StringConstraints(max_length=65536)]], Field(max_length=1024)] = []
    vocabulary: Annotated[dict[TokenId, Name], Field(max_length=1 << 20)] = {}
    redacted: bool = False
    media: Annotated[list[Media], Field(max_length=1 << 20)] = []
    operators: Annotated[list[Operator], Field(max_length=65536)] = []
    floor: Floor | None = None
    left_out: Annotated[list[Name], Field(max_length=256)] = []
    files: Annotated[dict[Name, File], Field(max_length=16)] = {}

    @property
    def dtype(self) -> str | None:
        """Dtype of the layers as `dtype_name` spells it; None if it was not recorded."""
        return dtype_name(self.config.get("dtype")) or dtype_name(self.config.get("torch_dtype"))
