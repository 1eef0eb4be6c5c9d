"""The simulator behind `kvsim`: what KV-cache offload costs on other hardware."""
