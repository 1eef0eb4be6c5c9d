"""Several nodes as a cluster: the map of its members, and how a node gets onto it."""
