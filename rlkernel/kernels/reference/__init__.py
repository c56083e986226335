"""Readable references: the contract's CPU arithmetic in torch ops, with the bits of the C++ kernels."""
