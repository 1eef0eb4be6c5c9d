r"""TLS between hosts: the node requires a token, and the client a certificate of the node.

Run the first three commands on the node's host; the client's host needs `certs/ca.pem` and `token`. Here both are this
machine: replace 127.0.0.1 everywhere by the node's own name or address, and open its ports (docs/operating.md).

    $ kvstore certificates certs --node 127.0.0.1
    $ kvstore token --out token | awk '{print "[acme]\ntokens_sha256 = [\"" $2 "\"]"}' > tenants.toml
    $ kvstore serve --data ./node --listen 127.0.0.1:7070 --tenants tenants.toml \
        --tls-cert certs/127.0.0.1.pem --tls-key certs/127.0.0.1.key &
    $ python examples/tls_between_hosts.py
    got: b'the KV of a page'
    without a token: NotAuthenticated
    over plain TCP: NodeUnavailable
"""

from kvstore.client import Client
from kvstore.errors import KvError
from kvstore.names import block_key

NODE, CA = "127.0.0.1:7070", "certs/ca.pem"
key, data = block_key(b"my model", b"the tokens"), b"the KV of a page"

with Client(NODE, ca=CA, token_file="token") as client:
    client.status(wait_s=60)  # the node may still be starting
    client.put_inline(key, data)
    print("got:", client.get_inline(key, len(data)))

strangers = {"without a token": Client(NODE, ca=CA), "over plain TCP": Client(NODE)}
for why, stranger in strangers.items():
    with stranger:
        try:
            stranger.put_inline(key, data)
        except KvError as error:
            print(f"{why}: {type(error).__name__}")
