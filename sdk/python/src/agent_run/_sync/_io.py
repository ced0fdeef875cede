"""What differs between asyncio and threads. `_async/_io.py` is its counterpart; all else is generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx

from .._config import Endpoint
from .._http import Content, options, pieces, transport_options

T = TypeVar("T")

HTTP = httpx.Client
Callback = Callable[[T], Any]
AnyContent = Content


def open_http(endpoint: Endpoint, timeout: float) -> httpx.Client:
    if endpoint.socket is not None:
        return httpx.Client(
            transport=httpx.HTTPTransport(**transport_options(endpoint)), **options(endpoint, timeout)
        )
    return httpx.Client(**transport_options(endpoint), **options(endpoint, timeout))


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def call(callback: Callback[T] | None, value: T) -> None:
    if callback is not None:
        callback(value)


def upload(content: AnyContent) -> bytes | Iterator[bytes]:
    """The body of a request."""
    return pieces(content)
