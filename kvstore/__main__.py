"""`python -m kvstore`."""

from kvstore.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
