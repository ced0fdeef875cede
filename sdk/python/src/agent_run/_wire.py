"""How values look on the wire: durations, bytes, paths."""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from .errors import ProtocolError

# A duration is seconds, a timedelta, or what the API takes ("90s", "1h30m").
Duration = float | timedelta | str

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")

# What one line of a stream may have: the largest event is a display of 4 MiB.
MAX_LINE = 64 << 20


def duration(value: Duration) -> str:
    """A duration as the API takes it."""
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 <= seconds < 1e9:
        raise ValueError(
            f"{value!r} is not a duration: use seconds from 0 on, a timedelta, or text such as '10m'"
        )
    return f"{round(seconds * 1e9)}ns"


def seconds(text: str) -> float:
    """The seconds of a duration as the API gives it, such as 1m2.5s."""
    total, end = 0.0, 0
    for part in _PART.finditer(text):
        if part.start() != end:
            break
        total, end = total + float(part[1]) * _UNITS[part[2]], part.end()
    if end != len(text) or not text:
        if text == "0":
            return 0.0
        raise ProtocolError(f"{text!r} is not a duration")
    return total


def instant(text: str) -> datetime:
    """A time of the API. Python before 3.11 knows neither Z nor nanoseconds."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", text)
    if match is None:
        raise ProtocolError(f"{text!r} is not a time")
    zone = "+00:00" if match[3] == "Z" else match[3]
    return datetime.fromisoformat(f"{match[1]}.{(match[2] or '')[:6]:0<6}{zone}")


def unpack(data: str, encoding: str | None) -> bytes:
    """The bytes of an output, which is text or base64."""
    if encoding == "base64":
        return base64.b64decode(data)
    return data.encode()


def pack(data: str | bytes) -> tuple[str, str]:
    """An input as JSON can hold it, and its encoding."""
    if isinstance(data, str):
        return data, "utf-8"
    return base64.b64encode(data).decode(), "base64"


def compact(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are given."""
    return {name: value for name, value in fields.items() if value is not None}


def new_key() -> str:
    """A key that makes a retry safe."""
    return uuid.uuid4().hex


_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def segment(kind: str, value: str) -> str:
    """A name or an id as a part of a path: nothing else may get there."""
    if not _SAFE.fullmatch(value) or value in (".", ".."):
        raise ValueError(
            f"{value!r} is not the {kind} of anything: use letters, digits, dots, dashes, underscores"
        )
    return value


class Lines:
    """Cuts bytes into lines. Only a newline ends one; `splitlines` knows ends that JSON does not escape."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._held += data
        start = 0
        while (end := self._held.find(b"\n", start)) >= 0:
            yield bytes(self._held[start:end])
            start = end + 1
        del self._held[:start]
        if len(self._held) > MAX_LINE:
            raise ProtocolError(f"the server sent a line of more than {MAX_LINE} bytes")
