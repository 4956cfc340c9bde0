"""Who has the engine: a manager's loop, or threads that paused it; and whether the loop is to end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Pauses and stops of a loop. All of it is guarded by the lock of ``changed``.

    Example::

        with gate.pause():          # any thread
            optimizer.step()
        with changed:               # the loop, between two steps
            gate.let_pauses_pass()
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._pauses = 0
        self._own = threading.local()  # pauses of each thread
        self.stopping: str | None = None
        """``"flush"`` or ``"hard"`` once the loop is to end."""
        self.keeps_memory = False
        """Whether the engine's memory is kept when the loop ends."""
        self.is_looping = False
        """Ends before the thread does, so that whoever is woken by its end sees it."""
        self.is_parked = False
        """Whether the loop stands still, so that threads that pause may go on."""
        self.fatal_error: BaseException | None = None
        """What ended the loop, if that was no stop."""

    @property
    def is_wanted(self) -> bool:
        """Whether a thread wants to pause, or has paused."""
        return self._pauses > 0

    def open(self) -> None:
        """A loop begins."""
        with self._changed:
            self.stopping, self.fatal_error, self.keeps_memory = None, None, False
            self.is_parked, self.is_looping = False, True

    def close(self) -> None:
        """The loop has ended."""
        with self._changed:
            self.is_looping = False
            self._changed.notify_all()

    def stop(self, *, hard: bool, keep_memory: bool) -> None:
        """Have the loop end. A hard stop is never softened."""
        with self._changed:
            self.stopping = "hard" if hard or self.stopping == "hard" else "flush"
            self.keeps_memory = keep_memory
            self._changed.notify_all()

    def why_denied(self) -> str | None:
        """Why no request is taken, if none is."""
        if self.fatal_error is not None:
            return f"the manager's thread ended with {type(self.fatal_error).__name__}: {self.fatal_error}"
        return "the manager is stopping" if self.stopping is not None else None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the loop between two steps.

        Raises:
            RuntimeError: the loop is not running, or ends before it could pause.
        """
        with self._changed:
            if not self.is_looping:
                raise RuntimeError("the manager is not running: there is nothing to pause")
            self._pauses += 1
            self._own.count = self._paused_here() + 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self.is_parked or not self.is_looping)
                if not self.is_parked:
                    raise RuntimeError("the manager ended before it could pause") from self.fatal_error
            except BaseException:
                self._leave()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave()

    def let_pauses_pass(self) -> bool:
        """Stand still while any thread pauses (with the lock held); whether one did."""
        was_wanted = self.is_wanted
        if was_wanted:
            self.is_parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_wanted)
            self.is_parked = False
        return was_wanted

    def refuse_inside_pause(self, what: str) -> None:
        """Raises RuntimeError in a thread that pauses the loop: ``what`` would wait for ever."""
        if self._paused_here():
            raise RuntimeError(f"{what} inside pause() would wait for ever: leave the pause first")

    def _paused_here(self) -> int:
        return int(vars(self._own).get("count", 0))

    def _leave(self) -> None:
        self._pauses -= 1
        self._own.count = self._paused_here() - 1
        self._changed.notify_all()
