"""The discrete-event half of the simulator: a cluster, what it is asked, and what comes of it."""
