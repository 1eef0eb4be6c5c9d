"""The entry point of the command `kvstore`, and of `python -m kvstore`."""

from kvcli.start import run_main

__all__ = ["main"]


def main() -> int:
    """Run the command; returns its exit status."""
    return run_main("kvstore.cli")


if __name__ == "__main__":
    raise SystemExit(main())
