"""Values on the wire, and errors of the API."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from agent_run import ApiError, ProtocolError, errors
from agent_run._http import Patience
from agent_run._wire import MAX_LINE, Lines, duration, instant, seconds, segment, unpack

ROOT = Path(__file__).parents[1]
API = ROOT.parents[1] / "api" / "openapi.yaml"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (90, "90000000000ns"),
        (0.25, "250000000ns"),
        (timedelta(minutes=2), "120000000000ns"),
        ("1h30m", "1h30m"),
        (0, "0ns"),
    ],
)
def test_duration(value: float | timedelta | str, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_bad_duration(value: float | timedelta) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1h2m3.5s", 3723.5),
        ("12.5ms", 0.0125),
        ("7µs", 7e-6),
        ("9ns", 9e-9),
        ("0s", 0),
        ("0", 0),
        ("2us", 2e-6),
    ],
)
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "1", "s", "1x", "1s ", "1h-2m", "h1"])
def test_bad_seconds(text: str) -> None:
    with pytest.raises(ProtocolError):
        seconds(text)


def test_instant() -> None:
    assert instant("2026-01-02T03:04:05.123456789Z") == datetime(2026, 1, 2, 3, 4, 5, 123456, timezone.utc)
    assert instant("2026-01-02T03:04:05+01:00").astimezone(timezone.utc).hour == 2
    assert instant("2026-01-02T03:04:05.1Z").microsecond == 100000
    with pytest.raises(ProtocolError):
        instant("yesterday")


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    patience = Patience(10)
    now += 100  # the first try takes its time
    pauses = [patience.pause() for _ in range(8)]
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    now += 10
    assert patience.pause() is None
    patience.renew()
    assert patience.pause() == 0.02


def test_bytes() -> None:
    assert unpack("ä", "utf-8") == "ä".encode()
    assert unpack("/wA=", "base64") == b"\xff\x00"


def test_lines() -> None:
    lines = Lines()
    assert list(lines.feed(b'{"a":')) == []
    assert list(lines.feed("1}\n\u2028\x85\r\n{".encode())) == [b'{"a":1}', "\u2028\x85\r".encode()]
    assert list(lines.feed(b"}\n")) == [b"{}"]
    with pytest.raises(ProtocolError, match="line"):
        list(lines.feed(bytes(MAX_LINE + 1)))


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "a?b", "a#b", "a b", "ä", "%2e", "x" * 129])
def test_bad_segments(value: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        segment("name", value)


def test_every_code_has_its_class() -> None:
    block = re.search(r"What programs branch on\.\n\s+enum:\n((?:\s+- \w+\n)+)", API.read_text())
    assert block is not None
    codes = re.findall(r"- (\w+)", block[1])
    assert set(codes) == set(errors.BY_CODE)
    for code in codes:
        error = errors.from_wire({"code": code, "message": "m", "cause": "c", "remediation": "r"}, status=500)
        assert type(error) is errors.BY_CODE[code]
        assert isinstance(error, ApiError)
        assert (error.code, error.message, error.cause, error.remediation) == (code, "m", "c", "r")
        assert str(error) == "m: c. r"
        assert getattr(errors, type(error).__name__) is type(error)


def test_unknown_errors() -> None:
    error = errors.from_wire({"code": "of_a_newer_daemon", "message": "m"}, status=418, request_id="id")
    assert type(error) is ApiError
    assert (error.code, error.status, error.request_id, str(error)) == ("of_a_newer_daemon", 418, "id", "m")
    bodies: tuple[object, ...] = (None, [], "text", {"message": "m"}, {"code": 7})
    for body in bodies:
        assert isinstance(errors.from_wire(body, status=502), ProtocolError)


def test_sync_half_is_made_of_the_async_one() -> None:
    done = subprocess.run([sys.executable, ROOT / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
