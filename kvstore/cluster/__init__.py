"""Several nodes that know of each other: the map of who is there, and how a node comes to be on it."""
