# Made by generate.py of src/agent_run/_async/files.py: change that one.
"""Files of a sandbox. A relative path starts in the working folder."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any

from .._http import Patience
from .._wire import compact
from ..errors import AgentRunError, ConnectionLostError, ShuttingDownError, UnavailableError, from_wire
from ..models import FileInfo, WatchEvent
from . import _io
from .transport import Request, Transport

_LOST = WatchEvent(type="overflow", path=None, folder=False, cookie=None)


class Watch:
    """Changes of a file or folder, as they happen.

    In the context every change is reported. If the connection is lost the watch begins
    again, and an `overflow` says that changes may have been missed.
    """

    def __init__(self, transport: Transport, request: Request) -> None:
        self._transport = transport
        self._request = request
        self._events: Generator[WatchEvent | None, None] | None = None

    def __enter__(self) -> Watch:
        self._events = self._run()
        # The first is that it watches, which is nobody's event.
        next(self._events)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._events is not None:
            self._events.close()

    def __iter__(self) -> Iterator[WatchEvent]:
        if self._events is None:
            raise AgentRunError(
                "a watch begins in a with statement: `with sandbox.files.watch(path) as changes:`"
            )
        for event in self._events:
            if event is not None:
                yield event

    def _run(self) -> Generator[WatchEvent | None, None]:
        patience = Patience(self._transport.retry_for)
        began = False
        while True:
            try:
                with closing(self._transport.events(self._request)) as events:
                    for event in events:
                        kind = event["type"]
                        if kind == "error":
                            raise from_wire(event.get("error"))
                        patience.renew()
                        if kind == "watching":
                            yield _LOST if began else None
                            began = True
                            continue
                        yield WatchEvent.from_wire(event)
                        if kind == "gone":
                            return
                problem: Exception = ConnectionLostError("the watch was cut off", sent=True)
            except (ConnectionLostError, ShuttingDownError, UnavailableError) as e:
                problem = e
            pause = patience.pause()
            if pause is None:
                raise problem
            _io.sleep(pause)


class Files:
    """Files of one sandbox."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._parent = ("sandboxes", sandbox, "files")

    def _request(
        self, method: str, *more: str, query: Mapping[str, Any] | None = None, **fields: Any
    ) -> Request:
        given = {name: _text(value) for name, value in compact(query or {}).items()}
        return Request(method, self._transport.path(*self._parent, *more), given or None, **fields)

    def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """A file as text."""
        return (self.read_bytes(path)).decode(encoding, errors)

    def read_bytes(self, path: str, *, offset: int | None = None, length: int | None = None) -> bytes:
        """A file, or a part of it."""
        query = {"path": path, "offset": offset, "length": length}
        return (self._transport.send(self._request("GET", query=query))).content

    def stream(
        self, path: str, *, offset: int | None = None, length: int | None = None
    ) -> Generator[bytes, None]:
        """A file piece by piece, however large it is."""
        query = {"path": path, "offset": offset, "length": length}
        with self._transport.open(self._request("GET", query=query)) as response:
            for data in self._transport.chunks(response):
                yield data

    def write(
        self,
        path: str,
        content: _io.AnyContent,
        *,
        mode: int | None = None,
        append: bool = False,
        exclusive: bool = False,
    ) -> int:
        """Writes a file as a whole, or not at all, and its missing folders; returns its size.

        `content` is text, bytes, a file that is open in binary mode, or pieces of bytes.
        """
        query = {
            "path": path,
            "mode": None if mode is None else f"{mode:o}",
            "append": append or None,
            "exclusive": exclusive or None,
        }
        written = self._transport.json(self._request("PUT", query=query, content=_io.upload(content)))
        size: int = written["size"]
        return size

    def list(self, path: str = ".", *, depth: int = 1) -> builtins.list[FileInfo]:
        """What is in a folder, by name, a folder before its contents."""
        found: builtins.list[FileInfo] = []
        after = None
        while True:
            query = {"path": path, "depth": depth, "limit": 1000, "after": after}
            page = self._transport.json(self._request("GET", "list", query=query))
            found += [FileInfo.from_wire(each) for each in page["items"]]
            after = page.get("next")
            if not after:
                return found

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What a file is; a symlink is followed unless you say otherwise."""
        query = {"path": path, "follow": follow}
        return FileInfo.from_wire(self._transport.json(self._request("GET", "stat", query=query)))

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def mkdir(self, path: str, *, mode: int | None = None, parents: bool = True) -> None:
        """Makes a folder, and with `parents` those above it; one that exists is no error then."""
        body = compact({"path": path, "mode": None if mode is None else f"{mode:o}", "parents": parents})
        self._transport.send(self._request("POST", "mkdir", body=body))

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Moves a file or folder."""
        body = {"from": source, "to": target, "overwrite": overwrite}
        self._transport.send(self._request("POST", "move", body=body))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file, or a folder, with all that is in it if `recursive`."""
        self._transport.send(self._request("DELETE", query={"path": path, "recursive": recursive or None}))

    def watch(self, path: str = ".", *, recursive: bool = False) -> Watch:
        """Changes of a file or folder: use it in a with statement, and iterate."""
        return Watch(
            self._transport,
            self._request("GET", "watch", query={"path": path, "recursive": recursive or None}),
        )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
