"""What each engine imports, which takes longer than to start one: engines are forked from a process that has it."""

from __future__ import annotations

from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
