"""The entry points of both commands: Ctrl-C while their modules are imported ends them without a traceback.

What always holds: this imports nothing that takes time, not even the commands' packages. A SIGINT that is ignored stays
ignored.
What it doesn't do: handle signals once the command runs; `kvcli.running` does.
"""

from __future__ import annotations

import importlib
import signal

__all__ = ["kvsim", "kvstore", "run_main"]


def run_main(module: str) -> int:
    """Import a command's module and call its `main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status: int = importlib.import_module(module).main()
    return status


def kvstore() -> int:
    """Run the command `kvstore`; returns its exit status."""
    return run_main("kvstore.cli")


def kvsim() -> int:
    """Run the command `kvsim`; returns its exit status."""
    return run_main("sim.cli")
