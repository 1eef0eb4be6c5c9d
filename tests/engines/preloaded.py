"""The imports of each engine, which take longer than starting one: engines are forked from a process with them."""

from __future__ import annotations

from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
