"""Triton kernels: one source for NVIDIA and AMD GPUs. Imported when an op first runs on a GPU."""
