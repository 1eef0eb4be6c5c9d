"""A software Cassini: a stand-in for libfabric that answers as the provider `cxi`; see docs/cassini.md."""
