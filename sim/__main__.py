"""`python -m sim`: the same as the command `kvsim`."""

from kvcli.start import kvsim

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(kvsim())
