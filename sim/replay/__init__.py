"""The discrete-event part of the simulator: a cluster, its load, and the results."""
