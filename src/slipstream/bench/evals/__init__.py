"""Accuracy checks over HTTP: GSM8K scored as lm-eval scores it, and token-for-token comparison."""
