# Made by generate.py of src/agent_run/_async/transport.py: change that one.
"""Requests, retries and streams of one server."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from .._config import Endpoint
from .._http import Patience, lost
from .._wire import Lines, segment
from ..errors import AgentRunError, ConnectionLostError, ProtocolError, ShuttingDownError, from_wire
from . import _io

NDJSON = "application/x-ndjson"

# What a buffered answer may take to come when it waits for a program: as long as that runs.
FOREVER = httpx.Timeout(None, connect=10.0)


@dataclass(frozen=True)
class Request:
    """A request, which can be made more than once if it is safe to."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Any = None  # sent as JSON
    content: Any = None  # sent as it is
    key: str | None = None  # makes a retry safe
    waits: bool = False  # the answer takes as long as a program runs

    @property
    def repeatable(self) -> bool:
        return self.method == "GET" or self.key is not None


class Transport:
    """Speaks with a server. It connects with the first request, and again after `close`."""

    def __init__(self, endpoint: Endpoint, namespace: str, *, timeout: float, retry_for: float) -> None:
        self.endpoint = endpoint
        self.namespace = namespace
        self.retry_for = retry_for
        self._base = f"/v1/namespaces/{segment('namespace', namespace)}"
        self._timeout = timeout
        self._lock = threading.Lock()  # protects _http, for threads that begin at once
        self._http: _io.HTTP | None = None

    def path(self, *parts: str) -> str:
        """The path of something in the namespace."""
        return "/".join((self._base, *(segment("name or id", p) for p in parts)))

    def _client(self) -> _io.HTTP:
        with self._lock:
            if self._http is None:
                self._http = _io.open_http(self.endpoint, self._timeout)
            return self._http

    def close(self) -> None:
        with self._lock:
            http, self._http = self._http, None
        if http is not None:
            http.close()

    def json(self, request: Request) -> Any:
        """The object of an answer."""
        response = self.send(request)
        try:
            return response.json()
        except ValueError as e:
            raise ProtocolError(
                f"the server at {self.endpoint} answered with something that is not JSON"
            ) from e

    def send(self, request: Request) -> httpx.Response:
        """The whole answer. A request that is safe to repeat is repeated if the connection breaks."""
        patience = Patience(self.retry_for)
        while True:
            try:
                with self.open(request) as response:
                    self._read(response)
                    return response
            except (ConnectionLostError, ShuttingDownError):
                pause = patience.pause() if request.repeatable else None
                if pause is None:
                    raise
            _io.sleep(pause)

    @contextmanager
    def open(self, request: Request, accept: str = "application/json") -> Iterator[httpx.Response]:
        """An answer that worked, whose body has not been read. It is asked for once."""
        http = self._client()
        headers = {"Accept": accept}
        if request.key is not None:
            headers["Idempotency-Key"] = request.key
        if request.content is not None:
            headers["Content-Type"] = "application/octet-stream"
        options: dict[str, Any] = {}
        if request.body is not None:
            options["json"] = request.body
        if request.waits or accept == NDJSON:
            options["timeout"] = FOREVER
        built = http.build_request(
            request.method,
            request.path,
            params=request.query,
            content=request.content,
            headers=headers,
            **options,
        )
        try:
            response = http.send(built, stream=True)
        except httpx.TransportError as e:
            raise lost(self.endpoint, e) from e
        try:
            if response.is_error:
                self._read(response)
                raise _problem(response)
            yield response
        finally:
            response.close()

    def _read(self, response: httpx.Response) -> None:
        try:
            response.read()
        except httpx.TransportError as e:
            raise lost(self.endpoint, e) from e

    def chunks(self, response: httpx.Response) -> Iterator[bytes]:
        """The body of an answer as it comes."""
        try:
            for data in response.iter_bytes():
                yield data
        except httpx.TransportError as e:
            raise lost(self.endpoint, e) from e

    def events(self, request: Request) -> Generator[dict[str, Any], None]:
        """The objects of a stream until it ends, as it should or not."""
        with self.open(request, NDJSON) as response:
            lines = Lines()
            for data in self.chunks(response):
                for line in lines.feed(data):
                    try:
                        event = json.loads(line)
                    except ValueError as e:
                        raise ProtocolError(
                            f"the server at {self.endpoint} sent an event that is not JSON"
                        ) from e
                    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
                        raise ProtocolError(f"the server at {self.endpoint} sent an event without a type")
                    yield event


def _problem(response: httpx.Response) -> AgentRunError:
    try:
        body = response.json()
    except ValueError:
        body = None
    return from_wire(body, status=response.status_code, request_id=response.headers.get("X-Request-Id", ""))
