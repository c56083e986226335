"""How an op is computed: the readable reference, the C++ CPU kernels, the Triton kernels, and the choice among them."""
