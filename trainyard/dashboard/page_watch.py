"""Work that repeats while a browser shows a page that needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class PageWatch:
    """Repeats `update` while there are pages. Used in the event loop only."""

    def __init__(self, pause: float) -> None:
        """Take the pause after each update, in seconds."""
        self._pause = pause
        self._pages = 0
        self._wake = asyncio.Event()

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        """Update as long as the context lasts."""
        self._pages += 1
        self._wake.set()
        try:
            yield
        finally:
            self._pages -= 1

    def update_soon(self) -> None:
        """Update without the pause, if a page is open: something was changed."""
        self._wake.set()

    async def run(self) -> None:
        """Update while there are pages, until the task is cancelled."""
        while True:
            self._wake.clear()
            if self._pages:
                await self.update()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._pause if self._pages else None)

    async def update(self) -> None:
        """Read the data of the pages once."""
        raise NotImplementedError
