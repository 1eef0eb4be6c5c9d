"""The commands of `kvstore`, one module each. `kvstore.cli` parses the arguments and calls them."""

__all__: list[str] = []
