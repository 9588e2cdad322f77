"""Decoder blocks run by fused kernels: what reads modules lies here, above models; kernels take tensors alone."""
