"""Decoding with the batch on the device: steps captured in CUDA graphs, the host one step behind."""
