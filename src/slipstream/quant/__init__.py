"""Quantization: number formats, schemes, Quark's and compressed-tensors' dialects, and the file-to-file pass."""
