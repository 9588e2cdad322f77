"""Triton kernels for GPUs: one source for NVIDIA and AMD, run in Triton's interpreter where there is no GPU."""
