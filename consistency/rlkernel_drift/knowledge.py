"""What is known about each cause: its name in words, what to change, and the public threads where it was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkernel_drift.verdict import Finding, Scalar, Thread


@dataclass(frozen=True)
class Cause:
    """One cause. `threads`: ("owner/repository", number, what was seen there)."""

    title: str
    fix: str
    threads: tuple[tuple[str, int, str], ...] = ()


CAUSES: dict[str, Cause] = {
    # ---- identity ----
    "weights-differ": Cause(
        "the two sides hold different weights",
        "Transfer all weights before the rollout, then compare the fingerprints of both sides by name.",
        (
            ("verl-project/verl", 7495, "LoRA adapter never delivered; norms bit-identical on every sync; KL up 36x"),
            ("huggingface/trl", 5312, "sleep level 2 dropped the engine's weights: 0.015 to 0.201"),
        ),
    ),
    "stale-weights": Cause(
        "the rollout used an older version of the weights",
        "Wait for the transfer to end before sampling, and check the version that each request was served with.",
        (
            ("huggingface/trl", 5313, "stale after sleep"),
            ("NovaSky-AI/SkyRL", 1345, "bucketed sync reused stale caches; reward collapse"),
        ),
    ),
    "partial-sync": Cause(
        "some tensors kept old values while others were updated",
        "Transfer the named tensors; look for fused or renamed parameters, and for tensors captured in CUDA graphs.",
        (
            ("pytorch/torchtitan", 3867, "fused wqkv: copies updated, the live weight never"),
            ("vllm-project/vllm", 48312, "table of reload faults"),
        ),
    ),
    "unchanged-though-trained": Cause(
        "tensors are bit-identical to the version before although the optimizer stepped",
        "Check that the tensors receive gradients, are in the optimizer, and are written back into the live parameter.",
        (("verl-project/verl", 7495, "norms bit-identical on every sync"),),
    ),
    "lora-missing": Cause(
        "one side computes without the LoRA adapter",
        "Load the adapter on that side, or merge it into the weights; check that lm_head adapters are supported.",
        (
            ("verl-project/verl", 7495, "adapter never delivered"),
            ("vllm-project/vllm", 51594, "LoRA on lm_head silently dropped from prompt log-probabilities"),
        ),
    ),
    "lora-scale": Cause(
        "one side applies the LoRA adapter at another scale",
        "Set the same lora_alpha / r on both sides, and rslora alike; do not merge and apply it both.",
        (
            ("vllm-project/vllm", 10798, "rslora ignored: adapter applied at another scale"),
            ("vllm-project/vllm", 6909, "alpha times the square root of the rank"),
        ),
    ),
    "tied-embedding": Cause(
        "one side computes the head with the wrong one of embedding and lm_head",
        "Make tie_word_embeddings agree with the checkpoint on both sides, and transfer lm_head where it is not tied.",
        (("vllm-project/vllm", 51665, "updates of the embedding would not reach the head"),),
    ),
    "quantised-weights": Cause(
        "one side computes with weights rounded to fewer bits",
        "Quantise both sides from the same tensor, or score on the quantised weights.",
        (
            ("InternLM/xtuner", 2044, "quantised from fp32 on one side, from bf16 on the other: k3 25 times larger"),
            ("PrimeIntellect-ai/prime-rl", 3112, "scales rounded to powers of two for 300 steps before it was noticed"),
        ),
    ),
    "swapped-weights": Cause(
        "two tensors of one shape were exchanged",
        "Check the name mapping of the transfer: the named tensors hold each other's values.",
        (("vllm-project/vllm", 48312, "table of reload faults"),),
    ),
    # ---- tokens ----
    "tokens-differ": Cause(
        "the two sides scored different tokens",
        "Hand token ids through, from the engine to the trainer; never decode and encode again.",
        (("NVIDIA-NeMo/RL", 1337, "retokenisation"), ("THUDM/slime", 117, "retokenisation")),
    ),
    "retokenised": Cause(
        "the text is the same, the tokens are not: it was decoded and encoded again",
        "Hand token ids through, from the engine to the trainer; never decode and encode again.",
        (
            ("huggingface/trl", 5224, "decode and encode changes ids"),
            ("rllm-org/rllm", 272, "KL spikes"),
            ("sgl-project/sglang", 26555, "re-tokenised media breaks the replay of routing"),
        ),
    ),
    "missing-bos": Cause(
        "one side has no beginning-of-sequence token",
        "Add special tokens on both sides or on neither; templates often contain the token already.",
        (
            ("huggingface/trl", 3853, "vLLM prepends a second beginning-of-sequence token"),
            ("microsoft/LMOps", 123, "token missing in training, present in evaluation"),
        ),
    ),
    "chat-template": Cause(
        "the prompts were rendered with different chat templates",
        "Render once, hand the ids through; compare the digests of chat_template on both sides.",
        (("OpenPipe/ART", 726, "Qwen3's template drops earlier <think> blocks"),),
    ),
    "truncated": Cause(
        "one side's sequences are cut short",
        "Use the same maximum length on both sides, and truncate on the same end.",
        (),
    ),
    "mask-differs": Cause(
        "the two sides count different tokens",
        "Build the mask once; tokens that the environment wrote are no part of the policy.",
        (
            ("NovaSky-AI/SkyRL", 354, "observation tokens with dummy log-probability 0 inflate the metric"),
            ("modelscope/ms-swift", 8427, "completion mask misaligned with the log-probabilities"),
        ),
    ),
    "observation-tokens": Cause(
        "tokens with log-probability exactly 0 are counted: tokens that nobody sampled",
        "Mask the observation tokens out on both sides.",
        (("NovaSky-AI/SkyRL", 354, "observation tokens with dummy log-probability 0"),),
    ),
    "swapped-media": Cause(
        "images or videos stand in another order on one side",
        "Keep media in the order of their tokens, and compare the digests of what the model saw.",
        (
            ("huggingface/trl", 6401, "ids expanded by the processor beside raw images"),
            ("NVIDIA-NeMo/RL", 2260, "gen_kl_error of 0.15 to 1.75 on a vision model"),
        ),
    ),
    "moved-media": Cause(
        "images or videos stand at other tokens on one side",
        "Expand the placeholder tokens of media once, and hand their places through with the token ids.",
        (),
    ),
    # ---- layout ----
    "positions": Cause(
        "the two sides gave the tokens different positions",
        "Compute positions from the attention mask on both sides, counting from each sequence's first token.",
        (
            ("huggingface/trl", 6800, "positions left out under left padding"),
            ("verl-project/verl", 4243, "response positions padded on the other side than the response"),
        ),
    ),
    "positions-restart": Cause(
        "positions start again at zero inside the sequence",
        "Give the whole sequence to one position counter; do not build position ids of prompt and response apart.",
        (("verl-project/verl", 4243, "positions of prompt and response built apart"),),
    ),
    "positions-shift": Cause(
        "positions jump inside the sequence",
        "Compute positions from the attention mask; padding between prompt and response must not count.",
        (("OpenRLHF/OpenRLHF", 217, "positions not derived from the mask"),),
    ),
    "padding-side": Cause(
        "padding tokens are attended to",
        "Pass the attention mask, pad on the side that the model expects, or pack without padding.",
        (("huggingface/trl", 5785, "padding direction silently corrupts the context"),),
    ),
    "off-by-one": Cause(
        "log-probabilities are shifted by one token",
        "The logits of token t predict token t + 1: shift on one side only once.",
        (
            ("PrimeIntellect-ai/prime-rl", 1525, "labels shifted on one side only"),
            ("lightseekorg/TorchSpec", 87, "hidden states shifted by one"),
        ),
    ),
    "rope-base": Cause(
        "the two sides use another base of the rotary embedding",
        "Take rope_theta from config.json on both sides; transformers 5 moved it into rope_parameters.",
        (
            ("intel/ipex-llm", 11747, "rope_theta not taken from config.json"),
            ("NVIDIA-NeMo/Automodel", 2039, "rope faults found layer by layer, by hand"),
        ),
    ),
    "rope-scaling": Cause(
        "the two sides scale rotary positions differently",
        "Use the same rope_scaling (type and factor) on both sides.",
        (("TransformerLensOrg/TransformerLens", 910, "wrong scaling factors of rope"),),
    ),
    "rope-dtype": Cause(
        "one side rounds the rotary frequencies to bfloat16",
        "Keep inv_freq in fp32: `model.to(bfloat16)` rounds the buffer, loading with the dtype does not.",
        (),
    ),
    "prefix-cache": Cause(
        "cached prefixes of older weights were used after an update",
        "Reset the prefix cache with every transfer of weights.",
        (
            ("InternLM/lmdeploy", 4917, "prefix cache not invalidated after the update"),
            ("vllm-project/vllm", 42019, "prompt log-probabilities beside a prefix cache return stale values"),
        ),
    ),
    # ---- semantics ----
    "temperature": Cause(
        "the two sides divide the logits by different temperatures",
        "Divide the trainer's logits by the sampling temperature, or ask the engine for raw log-probabilities.",
        (
            ("huggingface/trl", 4159, "temperature 0.6: first-token ratio of 2.0"),
            ("verl-project/verl", 6240, "raw or processed"),
        ),
    ),
    "top-p": Cause(
        "one side renormalises over the tokens that top-p kept, the other over the whole vocabulary",
        "Score over the kept sets on both sides, or ask the engine for raw log-probabilities.",
        (
            ("huggingface/trl", 6789, "bias is minus the log of the surviving mass"),
            ("vllm-project/vllm", 42259, "processed_logprobs renormalise over survivors"),
            ("PrimeIntellect-ai/prime-rl", 2979, "replay of kept sets gives 3e-4 for 200 steps"),
        ),
    ),
    "top-k": Cause(
        "one side renormalises over the tokens that top-k kept, the other over the whole vocabulary",
        "Score over the kept sets on both sides, or ask the engine for raw log-probabilities.",
        (("huggingface/trl", 6789, "truncated sampling renormalises"),),
    ),
    "min-p": Cause(
        "one side renormalises over the tokens that min-p kept, the other over the whole vocabulary",
        "Score over the kept sets on both sides, or ask the engine for raw log-probabilities.",
        (("huggingface/trl", 6789, "truncated sampling renormalises"),),
    ),
    "logprobs-mode": Cause(
        "one side's log-probabilities are raw, the other's are of the sampling distribution",
        "vLLM: logprobs_mode=processed_logprobs; trainer: apply the same temperature and kept sets.",
        (
            ("verl-project/verl", 6240, "raw or processed"),
            ("vllm-project/vime", 64, "raw_logprobs default: 0.011 grew to 0.036"),
        ),
    ),
    "padded-vocabulary": Cause(
        "one side sums over padding entries of the vocabulary",
        "Cut or mask the logits at the tokenizer's vocabulary size before the log-softmax.",
        (),
    ),
    "support": Cause(
        "one side calls a sampled token impossible",
        "Score over the sets that were sampled from; a token outside the kept set cannot have been sampled.",
        (("PrimeIntellect-ai/prime-rl", 2979, "kept-token masks"),),
    ),
    "not-finite": Cause(
        "log-probabilities are NaN or infinite",
        "Find the first operator whose output is not finite; do not replace NaN by numbers.",
        (("modelscope/ms-swift", 8123, "one NaN reward makes the batch NaN silently"),),
    ),
    "above-zero": Cause(
        "log-probabilities are above zero: no probability exceeds one",
        "Record the log-softmax of the logits at the token: no logits, no negative log-likelihoods, no entropies.",
        (),
    ),
    # ---- precision ----
    "bf16-logits": Cause(
        "logits are rounded to bfloat16 before the log-softmax",
        "Compute head and log-softmax in fp32 on both sides; enabling it on one side is worse than on none.",
        (
            ("AI-Hypercomputer/maxtext", 5231, "bf16 logits step by 0.03125"),
            ("allenai/open-instruct", 1387, "precision of the head"),
            ("vllm-project/vllm", 48390, "head_dtype"),
        ),
    ),
    "head-dtype": Cause(
        "the two sides compute the head in different precision",
        "Use the same head precision on both sides, fp32 if it can be had (vLLM: head_dtype).",
        (("huggingface/trl", 4303, "precision of the head"), ("NVIDIA-NeMo/RL", 3936, "one-sided is worse than none")),
    ),
    "rounded-records": Cause(
        "one side's log-probabilities were rounded to a few decimals when they were written down",
        "Record log-probabilities as fp32 numbers; do not format or round them.",
        (),
    ),
    "body-dtype": Cause(
        "the two sides compute the layers in different precision",
        "Run both sides in one dtype.",
        (("ServiceNow/Fast-LLM", 525, "table of precisions"),),
    ),
    "kernel-noise": Cause(
        "the differences are no larger than this stack's own noise",
        "Batch-invariant operators on both sides bring it to zero; see `rlkernel doctor`.",
        (
            ("verl-project/verl", 6280, "micro-batch sizes differ"),
            ("RLinf/RLinf", 1534, "4.6% of the trust region spent on numerics"),
        ),
    ),
    "kernels": Cause(
        "two implementations of one operator round differently",
        "Compute both sides with one batch-invariant definition (`use_rl_kernel_backend`), or accept a measured floor.",
        (
            ("verl-project/verl", 6280, "micro-batch sizes differ"),
            ("RLinf/RLinf", 1534, "4.6% of the trust region spent on numerics"),
        ),
    ),
    # ---- operators ----
    "operator": Cause(
        "one operator computes something else",
        "Compare the implementation of the named operator on both sides: epsilon, scale, activation, mask, weights.",
        (("NVIDIA-NeMo/Automodel", 2039, "five layer faults found by dumping tensors"),),
    ),
    "norm-epsilon": Cause(
        "the two sides add another epsilon in their norms",
        "Take rms_norm_eps (or layer_norm_eps) from config.json on both sides.",
        (),
    ),
    "activation": Cause(
        "one side computes GELU exactly, the other its tanh approximation",
        "Take hidden_act (or hidden_activation) from config.json on both sides; gelu and gelu_pytorch_tanh differ.",
        (),
    ),
    "configuration": Cause(
        "settings that change numbers differ",
        "Make the settings equal, one after the other, and compare again.",
        (("verl-project/verl", 2088, "log-probabilities differ on-policy"),),
    ),
    "drift": Cause(
        "the log-probabilities differ by more than the profile allows",
        "Run `rlkernel-drift diagnose` with the model to name the cause.",
        (("verl-project/verl", 2996, "old_log_prob differs from log_prob on-policy"),),
    ),
    "same-capsule": Cause(
        "both sides are one capsule",
        "Name the other side's capsule, or capture it.",
        (),
    ),
    "sides-exchanged": Cause(
        "the two inputs are named in the wrong order",
        "Name the rollout first and training second.",
        (),
    ),
    "nothing-compared": Cause(
        "nothing could be compared",
        "Record log-probabilities and masks on both sides, of the same sequences.",
        (),
    ),
}


def finding(
    cause: str,
    message: str,
    severity: Literal["error", "warning", "note"] = "error",
    **evidence: Scalar | list[Scalar],
) -> Finding:
    """A finding with the fix and the threads of its cause."""
    known = CAUSES[cause]
    return Finding(
        cause=cause, message=message, evidence=evidence, fix=known.fix, threads=threads(cause), severity=severity
    )


def threads(cause: str) -> list[Thread]:
    """Public threads of a cause."""
    return [
        Thread(name=f"{repository}#{number}", url=f"https://github.com/{repository}/issues/{number}", seen=seen)
        for repository, number, seen in CAUSES[cause].threads
    ]
