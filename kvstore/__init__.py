"""What keeps the bytes: the storage node, and how to reach it."""

from kvcli.version import package_version

__all__: list[str] = []

__version__ = package_version()
