"""SGLang's third tier: a `HiCacheStorage` over a node (`--hicache-storage-backend dynamic`)."""
