# Made by generate.py of src/agent_run/_async/follow.py: change that one.
"""Follows something that runs in a sandbox to its end, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Generic, TypeVar

from .._collect import Collector
from .._http import Patience
from .._wire import unpack
from ..errors import ConnectionLostError, ShuttingDownError, UnavailableError, from_wire
from . import _io
from .transport import Request, Transport

T = TypeVar("T")

# A daemon that ends tells so, and the next one knows the process: attach again.
_PASSING = (ConnectionLostError, ShuttingDownError, UnavailableError)


class Follower:
    """Knows how far the outputs of one process or execution have been read."""

    def __init__(
        self,
        transport: Transport,
        parent: tuple[str, ...],
        places: Mapping[str, int],
        collector: Collector,
        name: str | None = None,
    ) -> None:
        self.transport = transport
        self.parent = parent
        self.id = name
        self.started: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] | None = None  # the event of its exit
        self._places = dict(places)
        self._collector = collector

    def path(self, *more: str) -> str:
        return self.transport.path(*self.parent, self.id or "", *more)

    def _attach(self) -> Request:
        return Request("GET", self.path("output"), query={name: str(at) for name, at in self._places.items()})

    def events(self, opening: Request | None = None) -> Generator[Mapping[str, Any], None]:
        """Events from where they have been read to. `opening` starts it, and is made once."""
        if self.end is not None:
            return
        request = opening or self._attach()
        patience = Patience(self.transport.retry_for)
        while True:
            try:
                with closing(self.transport.events(request)) as events:
                    for event in events:
                        if self._take(event):
                            patience.renew()
                        yield event
                if self.end is not None:
                    return
                problem: Exception = ConnectionLostError("the stream was cut off", sent=True)
            except _PASSING as e:
                # Without an id nobody knows whether it runs; it is not started again.
                if self.id is None:
                    raise
                problem = e
            pause = patience.pause()
            if pause is None:
                raise problem
            _io.sleep(pause)
            request = self._attach()

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Notes how far an event leads, and whether it is progress."""
        kind = event["type"]
        if kind == "error":
            raise from_wire(event.get("error"))
        if kind == "started":
            self.id, self.started = event["id"], event
            for place, field in (("stdout", "stdoutOffset"), ("stderr", "stderrOffset"), ("event", "event")):
                if (
                    place in self._places
                    and self._places[place] >= 0
                    and event.get(field, 0) > self._places[place]
                ):
                    self._collector.truncated = True
                if field in event:
                    self._places[place] = event[field]
            return False
        if kind == "exit":
            self.end = event
        elif kind in ("stdout", "stderr"):
            self._places[kind] = event["offset"] + len(unpack(event["data"], event.get("encoding")))
        else:
            self._places["event"] = event["seq"] + 1
        return True


class Reader(Generic[T]):
    """What one follower gives, for whoever iterates."""

    def __init__(self, follower: Follower, collector: Collector, opening: Request | None = None) -> None:
        self._follower = follower
        self._collector = collector
        self._opening = opening
        self._cursor: Generator[T, None] | None = None

    def __iter__(self) -> Iterator[T]:
        """Goes on where the last iteration was left. Of two connections each would wait for
        the other's reader."""
        if self._cursor is None:
            self._cursor = self._read()
        return self._cursor

    def _read(self) -> Generator[T, None]:
        opening, self._opening = self._opening, None
        try:
            with closing(self._follower.events(opening)) as events:
                for event in events:
                    item = self._item(event)
                    if item is not None:
                        yield item
        finally:
            self._cursor = None

    def _item(self, event: Mapping[str, Any]) -> T | None:
        """What an event is to the caller, if anything."""
        raise NotImplementedError
