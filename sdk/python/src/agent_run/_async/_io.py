"""What differs between asyncio and threads. `_sync/_io.py` is its counterpart; all else is generated."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

import httpx

from .._config import Endpoint
from .._http import Content, options, pieces, transport_options

T = TypeVar("T")

HTTP = httpx.AsyncClient
# A callback may be a plain function or a coroutine function.
Callback = Callable[[T], Any]
AnyContent = Content | AsyncIterable[bytes]


def open_http(endpoint: Endpoint, timeout: float) -> httpx.AsyncClient:
    if endpoint.socket is not None:
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(**transport_options(endpoint)), **options(endpoint, timeout)
        )
    return httpx.AsyncClient(**transport_options(endpoint), **options(endpoint, timeout))


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def call(callback: Callback[T] | None, value: T) -> None:
    if callback is None:
        return
    result = callback(value)
    if inspect.isawaitable(result):
        await result


def upload(content: AnyContent) -> bytes | AsyncIterator[bytes]:
    """The body of a request. What a plain iterator blocks on blocks the loop."""
    if isinstance(content, AsyncIterable):
        return aiter(content)
    parts = pieces(content)
    if isinstance(parts, bytes):
        return parts

    async def flow() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return flow()
