"""LMCache over a node: an L2 adapter for its server, and a remote connector for an engine's own process."""
