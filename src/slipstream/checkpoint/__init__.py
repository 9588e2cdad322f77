"""Checkpoints on disk: folders of safetensors, GGUF files, name dialects, specs, tokenizers, the embedded model."""
