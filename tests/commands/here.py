"""Runs commands of `kvstore` in the tests' process, since starting a process is most of a command's cost.

It doesn't do that for commands that change their process, as `kvstore serve` does.
"""

from __future__ import annotations

import subprocess
import threading
from contextlib import redirect_stderr, redirect_stdout
from tempfile import TemporaryFile

from kvstore.cli import main


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvstore` in this process and capture its output as text, like `subprocess.run`."""
    assert threading.current_thread() is threading.main_thread(), "the standard streams are the process's"
    with (
        TemporaryFile("w+") as out,
        TemporaryFile("w+") as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            status: int = main(arguments)
        except SystemExit as ended:  # argparse has printed why
            status = int(ended.code or 0)
        for one in (out, err):
            one.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())
