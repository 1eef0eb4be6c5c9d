"""Which version of this distribution is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["package_version"]


def package_version() -> str:
    """The version of this distribution."""
    try:
        return version("triggerkv")
    except PackageNotFoundError:
        return "unknown"
