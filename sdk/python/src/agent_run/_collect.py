"""Makes a result of the events of a stream, with the bounds that a buffered answer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._wire import seconds, unpack
from .models import CodeError, CodeEvent, CodeResult, CommandResult, Mime, Output, Stream

# What a result holds of each output unless the caller says otherwise; the server's own.
OUTPUT_LIMIT = 1 << 20

Event = Mapping[str, Any]


def output(event: Event) -> Output:
    """The piece of output that an event of type stdout or stderr is."""
    stream: Stream = "stdout" if event["type"] == "stdout" else "stderr"
    return Output(stream, unpack(event["data"], event.get("encoding")), event["offset"])


def code_event(event: Event) -> CodeEvent:
    """What an event with a number is."""
    value = event.get("value")
    exception = event.get("exception")
    return CodeEvent(
        kind=event["type"],
        seq=event["seq"],
        value=None if value is None else Mime(value),
        error=None if exception is None else CodeError.from_wire(exception),
    )


class Collector:
    """Keeps what came, up to a limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = OUTPUT_LIMIT if limit is None else limit
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._result: Mime | None = None
        self._displays: list[Mime] = []
        self._error: CodeError | None = None
        self.truncated = False

    def add_output(self, piece: Output) -> None:
        kept = self._kept[piece.stream]
        room = self._limit - len(kept)
        kept += piece.data[:room]
        self.truncated = self.truncated or len(piece.data) > room

    def add_event(self, event: CodeEvent) -> None:
        if event.kind == "result":
            self._result = event.value
        elif event.kind == "display" and event.value is not None:
            self._displays.append(event.value)
        elif event.kind == "raised":
            self._error = event.error

    def command(self, process: str, end: Event) -> CommandResult:
        return CommandResult(
            **self._outputs(process, end), signal=end.get("signal"), max_rss=end.get("maxRSS")
        )

    def code(self, execution: str, context: str, end: Event) -> CodeResult:
        return CodeResult(
            **self._outputs(execution, end),
            context=context,
            status=end["status"],
            result=self._result,
            displays=list(self._displays),
            error=self._error,
            fresh=end.get("fresh", False),
            fresh_reason=end.get("freshReason"),
            reason=end.get("reason"),
            language=end.get("language", ""),
            count=end.get("count", 0),
        )

    def _outputs(self, name: str, end: Event) -> dict[str, Any]:
        return {
            "id": name,
            "exit_code": end["exitCode"],
            "stdout_bytes": bytes(self._kept["stdout"]),
            "stderr_bytes": bytes(self._kept["stderr"]),
            "truncated": self.truncated,
            "timed_out": end.get("timedOut", False),
            "wall": seconds(end["wall"]),
        }
