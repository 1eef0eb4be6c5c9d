"""What it would cost on hardware that is not here: the latency model behind `kvsim`."""
