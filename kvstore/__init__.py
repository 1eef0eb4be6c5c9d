"""A store for the KV cache of language models: the node, the clients and the command `kvstore`.

`help("kvstore.client")` begins with a program to copy. Start a node for it:

    kvstore serve --data ./node --http 127.0.0.1:9100 --ui

`kvstore --help` lists the commands: `put`, `get`, `sessions`, `explain`, `doctor`, and others. `kvstore.names` makes
keys, `kvstore.errors` has the errors, `kvstore.testing` starts a node for tests, `kvstore.engines` has adapters for
vLLM, transformers, SGLang and LMCache. The other modules are the service's own.
"""

from kvcli.version import package_version

__all__: list[str] = []

__version__ = package_version()
