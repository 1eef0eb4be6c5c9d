"""vLLM: `connector` is its KVConnectorBase_V1, `offloading` its OffloadingSpec."""
