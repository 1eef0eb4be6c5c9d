"""Frees the memory of gRPC's batches that fail, or that nobody awaits any more.

gRPC's asyncio API copies what a batch of operations sends (a status with its details, metadata), and frees the copies
only when the coroutine that awaits the batch goes on. If the batch fails because the client has reset its call, or the
coroutine is cancelled, they are never freed (https://github.com/grpc/grpc/issues/43360, in all versions up to 1.85),
and keep the memory around them from being returned to the system. So a client that resets its calls could make a node
grow for ever, even without a token.

What always holds: gRPC's own coroutine for a batch runs to its end once the batch has ended, whatever happened to the
batch and to its caller; then the caller gets the batch's error, or its own cancellation, as before.
What it doesn't do: cancel a batch. gRPC ends those of a call when the call ends.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = ["free_failed_batches"]

cygrpc: Any = import_module("grpc._cython.cygrpc")  # compiled, and without types


def free_failed_batches() -> None:
    """Let all batches of this process's asyncio servers and channels be freed, from now on."""
    execute = cygrpc.execute_batch
    if not getattr(execute, "frees_failed_batches", False):
        cygrpc.execute_batch = _freeing(execute)


def _freeing(execute: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def execute_batch(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
        batch = _Batch(loop)
        batch.begin(execute(call, operations, batch))
        error = await batch.ended
        if error is not None:
            try:
                raise error
            finally:
                del batch, error  # or its traceback would keep them, and itself

    execute_batch.frees_failed_batches = True  # type: ignore[attr-defined] # of a function
    return execute_batch


class _Batch:
    """A batch that is under way. gRPC's coroutine takes it for its event loop, and for the future that it awaits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[BaseException | None] = loop.create_future()
        self._steps: Coroutine[Any, Any, None] | None = None

    def begin(self, steps: Coroutine[Any, Any, None]) -> None:
        """Run gRPC's coroutine until it awaits the batch."""
        self._steps = steps
        steps.send(None)

    def create_future(self) -> _Batch:
        """The future that gRPC completes."""
        return self

    def call_soon_threadsafe(self, complete: Callable[..., None], *arguments: Any) -> None:
        """Complete it in its loop: one loop polls for all of a process."""
        if asyncio.get_running_loop() is self._loop:
            complete(*arguments)
        else:
            self._loop.call_soon_threadsafe(complete, *arguments)

    def __await__(self) -> Iterator[None]:
        yield

    def cancelled(self) -> bool:
        """Whether gRPC should leave it alone: never."""
        return False

    def set_result(self, _: None) -> None:
        """The batch has been executed."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """The batch has failed."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        steps, self._steps = self._steps, None
        try:
            if steps is not None:
                steps.send(None)  # it takes what was received, and frees the memory
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 - its caller's
            error = raised
        if not self.ended.done():
            self.ended.set_result(error)
