"""Changes of process-wide settings that several threads may want at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Shared:
    """Settings that hold while anybody needs them: the first to enter makes the changes, the last to leave undoes them.

    Were each thread to save and restore by itself, one that leaves would take them from the others, and one that
    entered late would restore what another had set.
    """

    def __init__(self, *settings: Callable[[], AbstractContextManager[object]]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._users = 0
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it is open, the settings hold."""
        with self._lock:
            if self._users == 0:
                with ExitStack() as stack:
                    for setting in self._settings:
                        stack.enter_context(setting())
                    self._stack = stack.pop_all()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._stack.close()
