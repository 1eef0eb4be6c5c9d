"""One suite for every backend of triggered operations: the same guarantees are tested on each."""
