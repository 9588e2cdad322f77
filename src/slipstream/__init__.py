"""Slipstream: EAGLE-3 speculative decoding, end to end.

>>> from slipstream.engine.llm import LLM
>>> LLM().chat([{"role": "user", "content": "Why is the sky blue?"}]).text
"""

__version__ = "0.1.0"
