"""The readable reference: the contract's CPU arithmetic spelled out in torch, equal to the C++ kernels to the bit."""
