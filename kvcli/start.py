"""The start of both commands: Ctrl-C while their modules are imported ends them without a traceback.

What always holds: this imports nothing that takes time. A SIGINT that is ignored stays ignored.
What it doesn't do: handle signals once the command runs; `kvcli.running` does.
"""

from __future__ import annotations

import importlib
import signal

__all__ = ["run_main"]


def run_main(module: str) -> int:
    """Import a command's module and call its `main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status: int = importlib.import_module(module).main()
    return status
