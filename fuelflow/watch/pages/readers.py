"""The browsers that follow a run: each is sent what it lacks, or is dropped."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fuelflow.watch.pages.feed import MAX_ADDED, Feed

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

# A reader that does not take what it is sent for so long is dropped.
SEND_SECS = 5.0
_QUIET_SECS = 15.0
# What waits for one reader is bounded by this and by the buffers of its connection.
_CHUNK_BYTES = 1 << 16


class Readers:
    """All readers of a feed; none knows, or waits for, another.

    All of it is used by the thread of one event loop.

    Args:
        feed: What they are told.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._news = asyncio.Event()
        self._is_stopping = False
        self.num = 0

    def tell(self, *, is_last: bool = False) -> None:
        """Has each look for what is new, and then leave if it is for the last time."""
        self._is_stopping = self._is_stopping or is_last
        self._news.set()
        self._news = asyncio.Event()

    def answer(self, event_id: str, headers: Mapping[str, str]) -> "Stream":
        """The answer to one that has everything up to a message."""
        return Stream(self, self._feed.number_of(event_id), headers)

    async def follow(
        self, number: int, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Writes all that one reader lacks, as it comes.

        Args:
            number: The newest record that it has; 0 if it has none.
            write: Raises if it does not take what is written.
        """
        num_added = 0
        await write(b"retry: 1000\n\n")
        while True:
            news = self._news
            frame = self._feed.after(number if num_added < MAX_ADDED else 0)
            number = frame.number
            num_added = 0 if frame.is_reset else num_added + frame.num_records
            if frame.body:
                await write(frame.body)
            if self._is_stopping:
                return
            try:
                async with asyncio.timeout(_QUIET_SECS):
                    await news.wait()
            except TimeoutError:
                await write(b": still here\n\n")  # so that a dead one is noticed


class Stream:
    """The answer to one reader: server-sent events, until it leaves or is dropped."""

    def __init__(
        self, readers: Readers, number: int, headers: Mapping[str, str]
    ) -> None:
        self._readers = readers
        self._number = number
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        self._headers = [
            (name.lower().encode(), value.encode())
            for name, value in {**headers, **kind}.items()
        ]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers, as ASGI has it.

        Raises:
            TimeoutError: If the reader takes nothing any more; its connection is then
                closed by the server.
        """
        del scope
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": self._headers})

        async def write(body: bytes) -> None:
            for first in range(0, len(body), _CHUNK_BYTES):
                part = _part(body[first : first + _CHUNK_BYTES], is_last=False)
                async with asyncio.timeout(SEND_SECS):
                    await send(part)

        tasks = [
            asyncio.ensure_future(self._readers.follow(self._number, write)),
            asyncio.ensure_future(_left(receive)),
        ]
        self._readers.num += 1
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._readers.num -= 1
            for task in tasks:
                task.cancel()
        await send(_part(b"", is_last=True))


def _part(body: bytes, *, is_last: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
