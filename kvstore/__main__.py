"""`python -m kvstore`: the same as the command `kvstore`."""

from kvcli.start import kvstore

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(kvstore())
