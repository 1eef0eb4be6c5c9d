"""KV caches of Hugging Face transformers as sessions of a node: saved after a turn, resumed in any process."""

from kvstore.engines.transformers.conversations import CacheStore, ChatSession, Resumed, Saved

__all__ = ["CacheStore", "ChatSession", "Resumed", "Saved"]
