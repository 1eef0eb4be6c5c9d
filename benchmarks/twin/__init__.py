"""What `bench_twin` runs: a client that replays its part of a trace against real nodes."""
