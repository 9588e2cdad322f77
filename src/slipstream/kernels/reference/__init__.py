"""The specification: every operation in plain torch, readable, and the path on machines without other kernels."""
