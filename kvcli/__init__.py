"""What the two commands, `kvstore` and `kvsim`, have in common: how they end, completion, and progress."""
