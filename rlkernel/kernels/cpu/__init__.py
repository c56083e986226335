"""Launchers of the C++ CPU kernels in `csrc/cpu`, through their plain C interface."""
