"""Code in kernels that stay: what one execution defines the next one uses, and a fork inherits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._collect import Collector, code_event, output
from .._wire import Duration, compact, duration
from ..errors import ProtocolError
from ..models import CodeContext, CodeError, CodeEvent, CodeResult, Language, Mime, Output
from . import _io
from .follow import AsyncFollower, AsyncReader
from .transport import AsyncTransport, Request

PLACES = {"stdout": 0, "stderr": 0, "event": 0}


@dataclass(frozen=True)
class Callbacks:
    """Who is told what as it comes."""

    stdout: _io.Callback[str] | None = None
    stderr: _io.Callback[str] | None = None
    result: _io.Callback[Mime] | None = None
    display: _io.Callback[Mime] | None = None
    error: _io.Callback[CodeError] | None = None

    def __bool__(self) -> bool:
        return any((self.stdout, self.stderr, self.result, self.display, self.error))

    async def tell(self, event: Output | CodeEvent) -> None:
        if isinstance(event, Output):
            await _io.call(self.stdout if event.stream == "stdout" else self.stderr, event.text)
        elif event.error is not None:
            await _io.call(self.error, event.error)
        elif event.value is not None:
            await _io.call(self.result if event.kind == "result" else self.display, event.value)


class AsyncExecution(AsyncReader[Output | CodeEvent]):
    """Code that runs in a sandbox, or has run. Iterating gives its output and what it shows, as it comes."""

    @property
    def id(self) -> str | None:
        """Its id, once something has been read or it was started in the background."""
        return self._follower.id

    def _item(self, event: Mapping[str, Any]) -> Output | CodeEvent | None:
        if event["type"] in ("stdout", "stderr"):
            piece = output(event)
            self._collector.add_output(piece)
            return piece
        if "seq" not in event:
            return None
        shown = code_event(event)
        self._collector.add_event(shown)
        return shown

    async def wait(self, callbacks: Callbacks | None = None) -> CodeResult:
        """Reads to its end. The result has what this object has read."""
        async for event in self:
            if callbacks is not None:
                await callbacks.tell(event)
        if self._follower.end is None or self._follower.id is None:
            raise ProtocolError("the execution has no end")
        context = self._follower.started.get("context", "")
        return self._collector.code(self._follower.id, context, self._follower.end)

    async def interrupt(self) -> None:
        """Interrupts it, as Ctrl-C does; one that waits for its turn is cancelled."""
        await self._follower.transport.send(Request("POST", self._follower.path("interrupt")))

    async def release(self) -> None:
        """Forgets it and its output, once it has ended."""
        await self._follower.transport.send(Request("DELETE", self._follower.path()))


def _id(context: str | CodeContext | None) -> str | None:
    return context.id if isinstance(context, CodeContext) else context


class AsyncCode:
    """Kernels of one sandbox. Nothing is ever run twice, whatever happens to the connection."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._parent = ("sandboxes", sandbox, "code")

    async def run(
        self,
        code: str,
        *,
        language: Language | None = None,
        context: str | CodeContext | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
        on_stdout: _io.Callback[str] | None = None,
        on_stderr: _io.Callback[str] | None = None,
        on_result: _io.Callback[Mime] | None = None,
        on_display: _io.Callback[Mime] | None = None,
        on_error: _io.Callback[CodeError] | None = None,
    ) -> CodeResult:
        """Runs code to its end. An exception is in the result's `error`; `check()` raises it.

        `timeout` interrupts it in the sandbox. With a callback, output and values come as
        they are shown.
        """
        fields = _fields(code, None, language, context, env, timeout)
        return await self._run(
            fields, output_limit, Callbacks(on_stdout, on_stderr, on_result, on_display, on_error)
        )

    async def run_text(
        self,
        text: str,
        *,
        context: str | CodeContext | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
        on_stdout: _io.Callback[str] | None = None,
        on_stderr: _io.Callback[str] | None = None,
    ) -> CodeResult:
        """Runs text that is Python or a command: `Sandbox.exec`."""
        fields = _fields(text, "text", None, context, env, timeout)
        return await self._run(fields, output_limit, Callbacks(on_stdout, on_stderr))

    async def _run(self, fields: Mapping[str, Any], limit: int | None, callbacks: Callbacks) -> CodeResult:
        path = self._transport.path(*self._parent)
        if callbacks:
            return await self._execution(None, limit, Request("POST", path, body=fields)).wait(callbacks)
        body = compact({**fields, "outputLimit": limit})
        return CodeResult.from_wire(await self._transport.json(Request("POST", path, body=body, waits=True)))

    def stream(
        self,
        code: str,
        *,
        language: Language | None = None,
        context: str | CodeContext | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
    ) -> AsyncExecution:
        """Code whose output is iterated over; it is started by the first step."""
        fields = _fields(code, None, language, context, env, timeout)
        return self._execution(
            None, output_limit, Request("POST", self._transport.path(*self._parent), body=fields)
        )

    async def start(
        self,
        code: str,
        *,
        id: str | None = None,  # noqa: A002 # as the API calls it
        language: Language | None = None,
        context: str | CodeContext | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
    ) -> AsyncExecution:
        """Starts code in the background."""
        fields = _fields(code, None, language, context, env, timeout)
        body = compact({**fields, "id": id, "background": True})
        started = await self._transport.json(Request("POST", self._transport.path(*self._parent), body=body))
        execution = self._execution(started["id"], output_limit, None)
        execution._follower.started = started
        return execution

    def connect(self, id: str, *, output_limit: int | None = None) -> AsyncExecution:  # noqa: A002
        """An execution that was started before; what it has shown is read from the beginning."""
        return self._execution(id, output_limit, None)

    def _execution(self, name: str | None, limit: int | None, opening: Request | None) -> AsyncExecution:
        collector = Collector(limit)
        parent = (*self._parent, "executions")
        return AsyncExecution(
            AsyncFollower(self._transport, parent, PLACES, collector, name), collector, opening
        )

    async def create_context(
        self,
        id: str | None = None,  # noqa: A002
        *,
        language: Language | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        start: bool = False,
    ) -> CodeContext:
        """Makes a context: a kernel with its own variables. `start` starts it now."""
        body = compact(
            {"id": id, "language": language, "cwd": cwd, "user": user, "env": env, "start": start or None}
        )
        return CodeContext.from_wire(await self._transport.json(Request("POST", self._contexts(), body=body)))

    async def contexts(self) -> list[CodeContext]:
        found = await self._transport.json(Request("GET", self._contexts()))
        return [CodeContext.from_wire(each) for each in found["items"]]

    async def restart_context(self, context: str | CodeContext) -> None:
        """Ends its kernel; the next execution has a new one."""
        await self._transport.send(Request("POST", self._contexts(_id(context), "restart")))

    async def interrupt_context(self, context: str | CodeContext) -> None:
        """Interrupts what runs in it."""
        await self._transport.send(Request("POST", self._contexts(_id(context), "interrupt")))

    async def delete_context(self, context: str | CodeContext) -> None:
        """Ends its kernel and forgets it."""
        await self._transport.send(Request("DELETE", self._contexts(_id(context))))

    def _contexts(self, *more: str | None) -> str:
        return self._transport.path(*self._parent, "contexts", *(part or "" for part in more))


def _fields(
    code: str,
    mode: str | None,
    language: Language | None,
    context: str | CodeContext | None,
    env: Mapping[str, str] | None,
    timeout: Duration | None,
) -> dict[str, Any]:
    return compact(
        {
            "code": code,
            "mode": mode,
            "language": language,
            "context": _id(context),
            "env": env,
            "timeout": None if timeout is None else duration(timeout),
        }
    )
