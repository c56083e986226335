"""What is known about each cause: a title, the remedy, and public threads in which it was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkernel_drift.verdict import Finding, Scalar, Thread


@dataclass(frozen=True)
class Cause:
    """One cause of drift."""

    title: str
    fix: str
    threads: tuple[Thread, ...]


def _cause(title: str, fix: str, *threads: str) -> Cause:
    """Each thread is written as "owner/repository#number: what was seen there"."""
    found = []
    for thread in threads:
        name, seen = thread.split(": ", 1)
        repository, number = name.split("#")
        found.append(Thread(name=name, url=f"https://github.com/{repository}/issues/{number}", seen=seen))
    return Cause(title, fix, tuple(found))


def _filter(name: str, *threads: str) -> Cause:
    return _cause(
        f"one side renormalises over the tokens that {name} kept, the other over the whole vocabulary",
        "Score over the kept sets on both sides, or record raw log-probabilities in the engine.",
        *threads,
    )


CAUSES: dict[str, Cause] = {
    # ---- identity ----
    "weights-differ": _cause(
        "the two sides hold different weights",
        "Transfer all weights before the rollout, then compare the fingerprints of both sides by name.",
        "verl-project/verl#7495: LoRA adapter never delivered; norms bit-identical on every sync; KL up 36x",
        "huggingface/trl#5312: sleep level 2 dropped the engine's weights: 0.015 to 0.201",
    ),
    "stale-weights": _cause(
        "the rollout used an older version of the weights",
        "Finish the weight transfer before sampling, and log the weight version that served each request.",
        "huggingface/trl#5313: stale after sleep",
        "NovaSky-AI/SkyRL#1345: bucketed sync reused stale caches; reward collapse",
    ),
    "partial-sync": _cause(
        "some tensors kept old values while others were updated",
        "Transfer the named tensors; look for fused or renamed parameters, and for tensors captured in CUDA graphs.",
        "pytorch/torchtitan#3867: fused wqkv: copies updated, the live weight never",
        "vllm-project/vllm#48312: table of reload faults",
    ),
    "unchanged-though-trained": _cause(
        "tensors are bit-identical to the previous version although the optimizer stepped",
        "Check that the tensors receive gradients, are in the optimizer, and are written back into the live parameter.",
        "verl-project/verl#7495: norms bit-identical on every sync",
    ),
    "lora-missing": _cause(
        "one side computes without the LoRA adapter",
        "Load the adapter on that side or merge it into the weights; check that the engine supports lm_head adapters.",
        "verl-project/verl#7495: adapter never delivered",
        "vllm-project/vllm#51594: LoRA on lm_head silently dropped from prompt log-probabilities",
    ),
    "lora-scale": _cause(
        "one side applies the LoRA adapter at another scale",
        "Use the same lora_alpha, r and rslora setting on both sides; never apply an adapter that is already merged.",
        "vllm-project/vllm#10798: rslora ignored: adapter applied at another scale",
        "vllm-project/vllm#6909: alpha times the square root of the rank",
    ),
    "tied-embedding": _cause(
        "one side computes the head with the wrong matrix (embedding instead of lm_head, or the reverse)",
        "Make tie_word_embeddings agree with the checkpoint on both sides, and transfer lm_head if it is not tied.",
        "vllm-project/vllm#51665: updates of the embedding would not reach the head",
    ),
    "quantised-weights": _cause(
        "one side computes with quantised weights",
        "Quantise both sides from the same tensor, or compute training log-probabilities with the quantised weights.",
        "InternLM/xtuner#2044: quantised from fp32 on one side, from bf16 on the other: k3 25 times larger",
        "PrimeIntellect-ai/prime-rl#3112: scales rounded to powers of two for 300 steps before it was noticed",
    ),
    "swapped-weights": _cause(
        "two tensors of one shape were swapped",
        "Check the name mapping of the weight transfer: each named tensor holds the other's values.",
        "vllm-project/vllm#48312: table of reload faults",
    ),
    "rank-fault": _cause(
        "some ranks compute otherwise than the others",
        "Compare device, driver, libraries and weights of those ranks with the others'. Run them on another device: if "
        "the fault stays with the device, replace it.",
    ),
    # ---- tokens ----
    "tokens-differ": _cause(
        "the two sides scored different tokens",
        "Pass token ids from the engine to the trainer; never decode and encode again.",
        "NVIDIA-NeMo/RL#1337: retokenisation",
        "THUDM/slime#117: retokenisation",
    ),
    "retokenised": _cause(
        "the text is equal but the tokens differ: it was decoded and encoded again",
        "Pass token ids from the engine to the trainer; never decode and encode again.",
        "huggingface/trl#5224: decode and encode changes ids",
        "rllm-org/rllm#272: KL spikes",
        "sgl-project/sglang#26555: re-tokenised media breaks the replay of routing",
    ),
    "missing-bos": _cause(
        "one side has no beginning-of-sequence token",
        "Add special tokens on both sides or on neither; chat templates often contain the token already.",
        "huggingface/trl#3853: vLLM prepends a second beginning-of-sequence token",
        "microsoft/LMOps#123: token missing in training, present in evaluation",
    ),
    "chat-template": _cause(
        "the prompts were rendered with different chat templates",
        "Render the prompt once and pass its ids on; compare the digests of chat_template on both sides.",
        "OpenPipe/ART#726: Qwen3's template drops earlier <think> blocks",
        "verl-project/verl#6921: turn separators",
    ),
    "truncated": _cause(
        "the sequences of one side are cut short",
        "Use the same maximum length and truncate the same end on both sides.",
    ),
    "mask-differs": _cause(
        "the two sides count different tokens",
        "Build the mask once; tokens that the environment wrote do not belong to the policy.",
        "NovaSky-AI/SkyRL#354: observation tokens with dummy log-probability 0 inflate the metric",
        "modelscope/ms-swift#8427: completion mask misaligned with the log-probabilities",
    ),
    "observation-tokens": _cause(
        "tokens with log-probability exactly 0 are counted: the policy did not sample them",
        "Mask the observation tokens out on both sides.",
        "NovaSky-AI/SkyRL#354: observation tokens with dummy log-probability 0",
    ),
    "swapped-media": _cause(
        "images or videos are in another order on one side",
        "Keep media in the order of their tokens, and compare the digests of what the model received.",
        "huggingface/trl#6401: ids expanded by the processor, images passed raw",
        "NVIDIA-NeMo/RL#2260: gen_kl_error of 0.15 to 1.75 on a vision model",
    ),
    "moved-media": _cause(
        "images or videos are at other token positions on one side",
        "Expand the placeholder tokens of media once, and pass their positions on with the token ids.",
    ),
    # ---- layout ----
    "layout": _cause(
        "media, placeholders, positions or scored tokens of the two sides differ",
        "Run `rlkernel-drift layout ROLLOUT TRAIN`, which prints both sides of the first differing span.",
        "vllm-project/vllm#47425: one image raises the mismatch from 0.055 to 0.303 nat",
        "verl-project/verl#3469: tokens do not match features",
    ),
    "positions": _cause(
        "the two sides gave the tokens different positions",
        "Compute positions from the attention mask on both sides, counting from the first token of each sequence.",
        "huggingface/trl#6800: positions left out under left padding",
        "verl-project/verl#4243: response positions padded on the other side than the response",
    ),
    "positions-restart": _cause(
        "positions restart at zero inside the sequence",
        "Number prompt and response with one position counter instead of building their position ids separately.",
        "verl-project/verl#4243: positions of prompt and response built separately",
    ),
    "positions-shift": _cause(
        "positions jump inside the sequence",
        "Compute positions from the attention mask; padding between prompt and response must not be counted.",
        "OpenRLHF/OpenRLHF#217: positions not derived from the mask",
    ),
    "padding-side": _cause(
        "padding tokens are attended to",
        "Pass the attention mask, pad on the side that the model expects, or pack without padding.",
        "huggingface/trl#5785: padding direction silently corrupts the context",
    ),
    "off-by-one": _cause(
        "log-probabilities are shifted by one or two tokens",
        "The logits at token t predict token t + 1: shift exactly once, on one side.",
        "PrimeIntellect-ai/prime-rl#1525: labels shifted on one side only",
        "lightseekorg/TorchSpec#87: hidden states shifted by one",
    ),
    "rope-base": _cause(
        "the two sides use different bases of the rotary embedding",
        "Take rope_theta from config.json on both sides; transformers 5 moved it into rope_parameters.",
        "intel/ipex-llm#11747: rope_theta not taken from config.json",
        "NVIDIA-NeMo/Automodel#2039: rope faults found layer by layer, by hand",
    ),
    "rope-scaling": _cause(
        "the two sides scale rotary positions differently",
        "Use the same rope_scaling (type and factor) on both sides.",
        "sgl-project/sglang#22711: YaRN",
        "TransformerLensOrg/TransformerLens#910: wrong scaling factors of rope",
    ),
    "rope-dtype": _cause(
        "one side rounds the rotary frequencies to bfloat16",
        "Keep inv_freq in fp32: `model.to(bfloat16)` rounds the buffer, loading with `dtype=bfloat16` does not.",
    ),
    "prefix-cache": _cause(
        "prefixes cached under older weights were used after an update",
        "Reset the prefix cache with every weight transfer.",
        "InternLM/lmdeploy#4917: prefix cache not invalidated after the update",
        "vllm-project/vllm#42019: prompt log-probabilities return stale values when a prefix cache is used",
    ),
    # ---- semantics ----
    "temperature": _cause(
        "the two sides divide the logits by different temperatures",
        "Divide the trainer's logits by the sampling temperature, or record raw log-probabilities in the engine.",
        "huggingface/trl#4159: temperature 0.6: first-token ratio of 2.0",
        "verl-project/verl#6240: raw or processed",
    ),
    "top-p": _filter(
        "top-p",
        "huggingface/trl#6789: bias is minus the log of the surviving mass",
        "vllm-project/vllm#42259: processed_logprobs renormalise over survivors",
        "PrimeIntellect-ai/prime-rl#2979: replay of kept sets gives 3e-4 for 200 steps",
    ),
    "top-k": _filter("top-k", "huggingface/trl#6789: truncated sampling renormalises"),
    "min-p": _filter("min-p", "huggingface/trl#6789: truncated sampling renormalises"),
    "logprobs-mode": _cause(
        "one side has raw log-probabilities, the other those of the sampling distribution",
        "In vLLM set logprobs_mode=processed_logprobs; in the trainer apply the same temperature and kept sets.",
        "verl-project/verl#6240: raw or processed",
        "vllm-project/vime#64: raw_logprobs default: 0.011 grew to 0.036",
    ),
    "padded-vocabulary": _cause(
        "one side includes padding entries of the vocabulary in the softmax",
        "Cut or mask the logits at the tokenizer's vocabulary size before the log-softmax.",
    ),
    "support": _cause(
        "one side gives a sampled token probability zero",
        "Score over the sets that were sampled from, because a token outside the kept set cannot have been sampled.",
        "PrimeIntellect-ai/prime-rl#2979: kept-token masks",
    ),
    "not-finite": _cause(
        "log-probabilities are NaN or infinite",
        "Find the first operator whose output is not finite; do not replace NaN with numbers.",
        "modelscope/ms-swift#8123: one NaN reward makes the batch NaN silently",
    ),
    "above-zero": _cause(
        "log-probabilities are above zero, but no probability exceeds one",
        "Record the log-softmax at the sampled token, not logits, negative log-likelihoods or entropies.",
    ),
    "generation-config": _cause(
        "one side applies the settings of generation_config.json, the other does not",
        "Set all sampling settings on both sides; vLLM applies the file by default (--generation-config vllm).",
        "verl-project/verl#7270: penalties and generation_config",
        "NVIDIA-NeMo/RL#3497: penalties applied on one side",
    ),
    "repetition-penalty": _cause(
        "one side applies a repetition penalty",
        "Set repetition_penalty to 1 while sampling, or record raw log-probabilities in the engine.",
        "verl-project/verl#7270: penalties and generation_config",
        "NVIDIA-NeMo/RL#3497: penalties applied on one side",
    ),
    "presence-penalty": _cause(
        "one side applies a presence penalty",
        "Set presence_penalty to 0 while sampling, or record raw log-probabilities in the engine.",
        "NVIDIA-NeMo/RL#3497: penalties applied on one side",
    ),
    "frequency-penalty": _cause(
        "one side applies a frequency penalty",
        "Set frequency_penalty to 0 while sampling, or record raw log-probabilities in the engine.",
        "NVIDIA-NeMo/RL#3497: penalties applied on one side",
    ),
    "logit-bias": _cause(
        "one side adds a bias to the logit of a token", "Remove logit_bias, or apply it in the trainer too."
    ),
    "masked-tokens": _cause(
        "one side masks tokens out before the log-softmax",
        "Compare bad_words, min_tokens, ignore_eos, grammars and the size of the vocabulary on both sides.",
    ),
    "soft-cap": _cause(
        "the two sides cap logits or attention scores differently",
        "Take final_logit_softcapping and attn_logit_softcapping from config.json on both sides; sdpa ignores the cap.",
    ),
    "units": _cause(
        "the log-probabilities of one side are in another unit, or are not log-probabilities",
        "Record natural logarithms of the sampled token's probability.",
    ),
    "aggregated": _cause(
        "the values of each request were summed, averaged or reordered before they were recorded",
        "Record one log-probability for each token, in the order of the tokens.",
    ),
    "placeholder": _cause(
        "the first or last value of each request is a placeholder",
        "Record the log-probability of every counted token, or do not count the token.",
    ),
    "clamped": _cause("the log-probabilities of one side were clamped", "Record log-probabilities without a bound."),
    "exchanged-requests": _cause(
        "log-probabilities were assigned to the wrong requests",
        "Match results to requests by id and not by their order of completion.",
    ),
    "wrong-candidate": _cause(
        "the recorded log-probability is that of another candidate than the sampled token",
        "Look the sampled token's id up in the candidates; the first candidate is the most likely token.",
        "NVIDIA-NeMo/RL#3297: the wrong candidate's log-probability",
    ),
    # ---- settings of the model ----
    "model-setting": _cause(
        "the two sides compute with another value of an entry of config.json",
        "Take the named entry from config.json on both sides.",
    ),
    "attention-window": _cause(
        "the two sides use attention windows of different sizes",
        "Take sliding_window and layer_types from config.json on both sides.",
    ),
    "attention-scale": _cause(
        "the two sides scale the attention scores differently",
        "Compare head_dim, query_pre_attn_scalar, attention_multiplier and the scaling factor of rope on both sides.",
    ),
    "attention-sinks": _cause(
        "one side leaves the attention sinks out",
        "Choose an attention backend that supports sinks.",
        "radixark/miles#1500: sinks dropped by a backend",
    ),
    "head-order": _cause(
        "query heads are assigned to other keys and values",
        "Compare how the fused projections are split and how keys and values are repeated.",
    ),
    "packed-attention": _cause(
        "tokens attend to other sequences of the same pack",
        "Pass cu_seqlens or a block-diagonal mask; restarting positions alone do not separate packed sequences.",
        "THUDM/slime#1686: attention across packed sequences",
        "modelscope/ms-swift#9618: attention across packed sequences",
    ),
    "kv-cache-dtype": _cause(
        "one side rounds keys and values in its cache",
        "Set kv_cache_dtype to the model's dtype, or score with the same rounding.",
        "vllm-project/vllm#54035: fp8 KV cache",
        "sgl-project/sglang#25790: fp8 KV cache",
    ),
    "cache-cut": _cause(
        "a part of the prompt is missing in the cache",
        "Compare block tables and prefix-cache hits; the named tokens of the prompt are not attended to.",
    ),
    "mid-request": _cause(
        "weights or settings changed in the middle of requests",
        "Stop or abort running requests before a weight transfer, or record the weight version of each token.",
        "vllm-project/vllm#54443: weights changed in mid-request",
        "THUDM/slime#2092: weights changed in mid-request",
    ),
    "some-requests": _cause(
        "some requests were computed otherwise than the rest",
        "Compare replica, weight version, batch and settings of the named requests with the others'.",
    ),
    "some-places": _cause(
        "tokens at certain places of the completions differ while the rest matches",
        "Look for what begins or ends there: a weight update, a chunk, a page, a window, a speculative step.",
    ),
    "few-tokens": _cause(
        "a few tokens differ while all others match",
        "Look for a race: asynchronous copies, reused buffers, tokens at chunk or block boundaries.",
    ),
    "missing-weights": _cause(
        "a tensor was not loaded, or is interpreted differently",
        "Check that the named tensor is transferred and how it is used.",
    ),
    "scaled-weights": _cause(
        "a tensor is scaled", "Compare scales of quantisation, merged adapters and the named operator on both sides."
    ),
    "rope-layout": _cause(
        "queries and keys are permuted for the other layout of rope",
        "Convert q_proj and k_proj once between neighbouring pairs and halves, and match the engine's rope style.",
    ),
    "lora-precision": _cause(
        "one side merged the LoRA adapter in fewer bits",
        "Merge in fp32 and round once, or apply the adapter unmerged on both sides.",
        "NVIDIA-NeMo/RL#3696: LoRA merged in bf16",
    ),
    "operator-dtype": _cause(
        "one operator computes in fewer bits on one side",
        "Compute the named operator in the same precision on both sides.",
    ),
    "vocabulary-shard": _cause(
        "the log-softmax sums only a part of the vocabulary on one side",
        "Add the partial sums of all vocabulary shards before the logarithm.",
    ),
    "quantised-activations": _cause(
        "inputs of the projections are rounded to eight or four bits on one side",
        "Compare against the same quantisation in the trainer, or switch it off for the rollout.",
    ),
    # ---- precision ----
    "bf16-logits": _cause(
        "logits are rounded to bfloat16 before the log-softmax",
        "Compute the head and the log-softmax in fp32 on both sides; fp32 on one side only is worse than on neither.",
        "AI-Hypercomputer/maxtext#5231: bf16 logits step by 0.03125",
        "allenai/open-instruct#1387: precision of the head",
        "vllm-project/vllm#48390: head_dtype",
    ),
    "head-dtype": _cause(
        "the two sides compute the head in different precisions",
        "Use the same head precision on both sides, fp32 if available (vLLM: head_dtype).",
        "huggingface/trl#4303: precision of the head",
        "NVIDIA-NeMo/RL#3936: one-sided is worse than none",
    ),
    "rounded-records": _cause(
        "the log-probabilities of one side were rounded when they were recorded, to decimals or to 16 bits",
        "Record log-probabilities as fp32 numbers; do not format or round them.",
        "THUDM/slime#892: bfloat16 log-probabilities",
    ),
    "body-dtype": _cause(
        "the two sides compute the layers in different precisions",
        "Run both sides in the same dtype.",
        "ServiceNow/Fast-LLM#525: table of precisions",
    ),
    "kernels": _cause(
        "two implementations of one operator round differently",
        "Use one batch-invariant implementation on both sides (`use_rl_kernel_backend`), or accept a measured floor.",
        "verl-project/verl#6280: micro-batch sizes differ",
        "RLinf/RLinf#1534: 4.6% of the trust region spent on numerics",
    ),
    # ---- operators ----
    "operator": _cause(
        "one operator computes a different function",
        "Compare the implementation of the named operator on both sides: epsilon, scale, activation, mask, weights.",
        "NVIDIA-NeMo/Automodel#2039: five layer faults found by dumping tensors",
    ),
    "norm-epsilon": _cause(
        "the norms of the two sides use different epsilons",
        "Take rms_norm_eps (or layer_norm_eps) from config.json on both sides.",
    ),
    "activation": _cause(
        "one side computes the exact GELU, the other its tanh approximation",
        "Take hidden_act (or hidden_activation) from config.json on both sides; gelu and gelu_pytorch_tanh differ.",
    ),
    "configuration": _cause(
        "settings that change the numbers differ",
        "Make the settings equal one at a time, and compare again.",
        "verl-project/verl#2088: log-probabilities differ on-policy",
    ),
    "drift": _cause(
        "the log-probabilities differ by more than the profile allows",
        "Run `rlkernel-drift diagnose` with the model to name the cause.",
        "verl-project/verl#2996: old_log_prob differs from log_prob on-policy",
    ),
    "same-capsule": _cause("both sides are the same capsule", "Name the other side's capsule, or capture it."),
    "sides-exchanged": _cause("the two inputs are in the wrong order", "Name the rollout first and training second."),
    "nothing-compared": _cause(
        "nothing could be compared", "Record log-probabilities and masks on both sides for the same sequences."
    ),
}


def finding(
    cause: str, message: str, severity: Literal["error", "warning", "note"] = "error", **evidence: Scalar | list[Scalar]
) -> Finding:
    """A finding with the remedy and the threads of its cause."""
    known = CAUSES[cause]
    return Finding(
        cause=cause, message=message, evidence=evidence, fix=known.fix, threads=list(known.threads), severity=severity
    )
