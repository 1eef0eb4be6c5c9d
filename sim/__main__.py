"""The entry point of the command `kvsim`, and of `python -m sim`."""

from kvcli.start import run_main

__all__ = ["main"]


def main() -> int:
    """Run the command; returns its exit status."""
    return run_main("sim.cli")


if __name__ == "__main__":
    raise SystemExit(main())
