"""How a client of httpx is made for an endpoint, and what its errors mean."""

from __future__ import annotations

import io
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any

import httpx

from ._config import Endpoint
from ._version import __version__
from .errors import ConnectionLostError

CHUNK = 64 << 10

# What a file can be written from. The async client also takes async iterables.
Content = str | bytes | bytearray | memoryview | IO[bytes] | Iterable[bytes]


def options(endpoint: Endpoint, timeout: float) -> dict[str, Any]:
    """Arguments of both clients of httpx."""
    headers = {"User-Agent": f"agent-run-python/{__version__}", "Accept-Encoding": "identity"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    return {
        "base_url": endpoint.url,
        "headers": headers,
        # A proxy of the environment leads nowhere from a socket.
        "trust_env": endpoint.socket is None,
        "timeout": httpx.Timeout(timeout, connect=10.0, pool=None),
    }


def transport_options(endpoint: Endpoint) -> dict[str, Any]:
    """Arguments of both transports of httpx. Many streams may be open at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60.0)
    if endpoint.socket is not None:
        return {"uds": endpoint.socket, "limits": limits}
    return {"verify": ssl.create_default_context(cafile=endpoint.ca_file), "limits": limits}


def lost(endpoint: Endpoint, error: httpx.TransportError) -> ConnectionLostError:
    """What a broken connection means to the caller."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return ConnectionLostError(
            f"the server at {endpoint} cannot be reached ({error}). "
            "Check that the daemon runs and that the address is right",
            sent=False,
        )
    kind = type(error).__name__
    return ConnectionLostError(
        f"the connection to the server at {endpoint} broke: {error or kind}", sent=True
    )


def pieces(content: Content) -> bytes | Iterator[bytes]:
    """What is sent of a file's content."""
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, io.TextIOBase):
        raise TypeError("the file is open for text: open it in binary mode ('rb')")
    if hasattr(content, "read"):
        return iter(lambda: content.read(CHUNK), b"")
    return iter(content)


class Patience:
    """How long something is tried again, with growing pauses. It counts from the first failure."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.renew()

    def renew(self) -> None:
        """Begins anew, for there was progress."""
        self._end: float | None = None
        self._pause = 0.02

    def pause(self) -> float | None:
        """How long to wait before the next try; None if there is no more."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._limit
        if now >= self._end:
            return None
        pause, self._pause = self._pause, min(self._pause * 2, 1.0)
        return pause
