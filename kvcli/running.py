"""How both commands run and end: one sentence for an error, and exit statuses with the same meaning in each.

What always holds: a closed pipe (`| head -1`) ends the command without a message; SIGTERM, and SIGHUP unless it is
ignored, clean up as Ctrl-C does; an error of the operating system is a sentence with the file's name. A traceback is a
bug.
"""

from __future__ import annotations

import argparse
import codecs
import enum
import io
import os
import select
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CommandParser", "Status", "add_commands", "check_reader", "ended_by", "run_command"]


class Status(enum.IntEnum):
    """Exit statuses; docs/commands.md has the table."""

    DONE = 0
    FAILED = 1
    USAGE = 2  # argparse's status
    NO = 3
    BUG = 70  # of a node that ends with an unexpected error
    HUNG_UP = 128 + signal.SIGHUP
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


class CommandParser(argparse.ArgumentParser):
    """A command's or a subcommand's parser, which shows its own usage for an unknown argument."""

    def __init__(self, **named: Any) -> None:
        """As argparse's, which would take `--token` for `--token-file`, until another option begins like that."""
        super().__init__(allow_abbrev=False, **named)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which would leave unknown arguments to the main parser, and report a missing command first."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and getattr(known, action.dest) is None:  # noqa: SLF001
                self.error(f"the following arguments are required: {action.metavar}")
        return known, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which would ignore that the help could not be written."""
        (file or sys.stderr).write(message or "")


def add_commands(
    parser: argparse.ArgumentParser, dest: str = "command"
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Let a `CommandParser` have subcommands, which `add_parser` of the result adds; one of them is required."""
    kind: type[argparse.ArgumentParser] = CommandParser
    return parser.add_subparsers(dest=dest, metavar=dest.upper(), parser_class=kind)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = Status(128 + number)


def run_command(
    name: str,
    work: Callable[[], int],
    status_of: Callable[[Exception], Status | None] = lambda _: None,
    *,
    ends_process: bool = False,
) -> int:
    """Do `work`, and return the exit status of the process.

    `status_of` returns that of an error which the command knows, else None. With `ends_process` the caller exits with
    this status at once, and later signals don't change it.
    """
    if not _has_output():
        print(f"{name}: Standard output is closed.", file=sys.stderr)  # noqa: T201 - a command prints
        return Status.FAILED
    try:
        with _terminated_like_interrupted(ends_process=ends_process):
            try:
                status = work()
            except SystemExit:  # argparse has printed the help or the error
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return Status.DONE
    except KeyboardInterrupt as signalled:
        return signalled.status if isinstance(signalled, _Ended) else Status.INTERRUPTED
    except Exception as error:
        ended = ended_by(error, status_of(error))
        if ended is None:
            raise
        status, sentence = ended
        print(f"{name}: {sentence}", file=sys.stderr)  # noqa: T201 - a command prints
        try:
            sys.stdout.flush()
        except OSError:  # the disk is full, and a flush at exit would be a traceback
            _drop_output()
    return status


def ended_by(error: Exception, status: Status | None) -> tuple[Status, str] | None:
    """The exit status and sentence of an error; None: it is a bug. `status` is that of one of the command's own."""
    if status is not None:
        return status, str(error)
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return Status.USAGE, "An argument is not valid UTF-8."
    if isinstance(error, MemoryError):
        return Status.FAILED, "Out of memory."
    if isinstance(error, OSError) and error.strerror is not None:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return Status.FAILED, f"{where}{error.strerror}."
    return None


def check_reader() -> None:
    """End a command that prints rarely if standard output is a pipe that nobody reads any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if any(events & select.POLLERR for _, events in output.poll(0)):
        raise BrokenPipeError


def _has_output() -> bool:
    """Return whether standard output is open; closed standard streams are redirected to /dev/null.

    Otherwise the next file to be opened, such as a drive, would get a stream's descriptor and be written to as such.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    has_output = sys.stdout is not None
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open(mode))  # noqa: SIM115 - for as long as the process
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        out.reconfigure(errors="backslashreplace")  # what it lacks, say in a user's name, is escaped
    return has_output


def _drop_output() -> None:
    """What is printed goes nowhere, so leave nothing to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminated_like_interrupted(*, ends_process: bool) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise _Ended(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    signal.signal(signal.SIGTERM, end)
    if before[signal.SIGHUP] is signal.SIG_DFL:  # `nohup` has it ignored
        signal.signal(signal.SIGHUP, end)
    if before[signal.SIGINT] is signal.SIG_DFL:  # as `kvcli.start` left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends_process:  # Python and libfabric's libraries restore the defaults before the process has ended
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends_process else handler)
