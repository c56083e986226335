"""rlkernel_vllm: vLLM computes a rollout with rlkernel's ops, so its log-probabilities are a trainer's, to the bit."""


def register() -> None:
    """Entry point of vLLM's general plugins."""
