"""A cluster: three nodes that find each other through etcd, and a client that knows one of them.

A node that is lost leaves the list within seconds, and its users go to the others (docs/cluster.md).

    $ etcd --data-dir ./etcd --log-level error &
    $ kvstore serve --data ./node1 --listen 127.0.0.1:7070 --cluster 127.0.0.1:2379/chat &
    $ kvstore serve --data ./node2 --listen 127.0.0.1:7071 --cluster 127.0.0.1:2379/chat &
    $ kvstore serve --data ./node3 --listen 127.0.0.1:7072 --cluster 127.0.0.1:2379/chat &
    $ python examples/cluster.py
    127.0.0.1:7070 ... users
    127.0.0.1:7071 ... users
    127.0.0.1:7072 ... users
    every user's KV is there, and on its home alone
"""

import time
from collections import Counter

from kvstore.client import Nodes
from kvstore.names import block_key

USERS = [f"user {number}" for number in range(300)]

with Nodes(["127.0.0.1:7070"]) as nodes:
    nodes.at("127.0.0.1:7070").status(wait_s=60)  # the nodes may still be starting
    for _ in range(100):
        if len(nodes.map.members) == 3:
            break
        time.sleep(0.1)

    for user in USERS:  # a user's home is the same for every client of the cluster
        nodes.of(user).put_inline(block_key(user.encode()), user.encode())
    for home, users in sorted(Counter(nodes.home(user) for user in USERS).items()):
        print(home, users, "users")

    for user in USERS:
        key = block_key(user.encode())
        holders = [one.node for one in nodes.map.members if nodes.at(one.node).prefix([key]).blocks]
        assert holders == [nodes.home(user)]
    print("every user's KV is there, and on its home alone")
