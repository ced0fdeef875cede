"""Programs in a sandbox: argv or shell, to their end, streamed, or in the background."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from .._collect import Collector, output
from .._http import Content
from .._wire import Duration, compact, duration, pack
from ..errors import AgentRunError, ConflictError, NotFoundError, ProtocolError, SandboxEndedError
from ..models import CommandResult, Output, ProcessInfo, SignalScope
from . import _io
from .follow import AsyncFollower, AsyncReader
from .transport import AsyncTransport, Request

# A list is a program and its arguments, text is for `/bin/sh -c`.
Command = str | Sequence[str]

PLACES = {"stdout": 0, "stderr": 0}


def exec_body(command: Command, **fields: Any) -> dict[str, Any]:
    """The body of a request that starts a program."""
    form = {"shell": command} if isinstance(command, str) else {"argv": list(command)}
    return compact({**form, **fields})


class AsyncProcess(AsyncReader[Output]):
    """A program that runs in a sandbox, or has run.

    Iterating gives its output as it comes, and survives lost connections and restarts of
    the daemon. Leaving the context kills what still runs.
    """

    @property
    def id(self) -> str:
        if self._follower.id is None:
            raise AgentRunError("the process has no id yet: read from it first")
        return self._follower.id

    @property
    def pid(self) -> int | None:
        """Its number in the sandbox, once output has been read or it was started in the background."""
        return self._follower.started.get("pid")

    @property
    def exit_code(self) -> int | None:
        """Its exit code, once its output has been read to the end."""
        return None if self._follower.end is None else self._follower.end["exitCode"]

    def _item(self, event: Mapping[str, Any]) -> Output | None:
        if event["type"] not in ("stdout", "stderr"):
            return None
        piece = output(event)
        self._collector.add_output(piece)
        return piece

    async def wait(
        self, *, on_stdout: _io.Callback[str] | None = None, on_stderr: _io.Callback[str] | None = None
    ) -> CommandResult:
        """Reads to its end. The result has what was read of its output by this object."""
        async for piece in self:
            await _io.call(on_stdout if piece.stream == "stdout" else on_stderr, piece.text)
        if self._follower.end is None:
            raise ProtocolError("the process has no end")
        return self._collector.command(self.id, self._follower.end)

    async def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Writes to its standard input; returns when it was taken."""
        await self._input(data, close=close)

    async def close_stdin(self) -> None:
        """Ends its standard input. A terminal gets Ctrl-D."""
        await self._input(b"", close=True)

    async def _input(self, data: Content, *, close: bool) -> None:
        query = {"close": "true"} if close else None
        await self._follower.transport.send(
            Request("POST", self._follower.path("stdin"), query, content=_io.upload(data))
        )

    async def signal(self, signal: str | int, *, scope: SignalScope = "process") -> None:
        """Sends a signal: a name such as `TERM`, or a number."""
        await self._follower.transport.send(
            Request("POST", self._follower.path("signal"), body={"signal": str(signal), "scope": scope})
        )

    async def kill(self) -> None:
        """Kills it and all of its session."""
        await self.signal("KILL", scope="session")

    async def info(self) -> ProcessInfo:
        return ProcessInfo.from_wire(
            await self._follower.transport.json(Request("GET", self._follower.path()))
        )

    async def release(self) -> None:
        """Forgets it and its output, once it has ended."""
        await self._follower.transport.send(Request("DELETE", self._follower.path()))

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cursor is not None:
            await self._cursor.aclose()
        if self._follower.id is None or self._follower.end is not None:
            return
        try:
            if (await self.info()).running:
                await self.kill()
        except (ConflictError, NotFoundError, SandboxEndedError):
            pass  # it ended by itself, or with its sandbox


class AsyncTerminal(AsyncProcess):
    """A program on a terminal; all of its output is stdout."""

    async def resize(self, rows: int, cols: int) -> None:
        await self._follower.transport.send(
            Request("POST", self._follower.path("resize"), body={"rows": rows, "cols": cols})
        )

    async def __aenter__(self) -> AsyncTerminal:
        return self


class AsyncCommands:
    """Programs of one sandbox. None is ever started twice, whatever happens to the connection."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._parent = ("sandboxes", sandbox, "execs")

    async def run(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
        on_stdout: _io.Callback[str] | None = None,
        on_stderr: _io.Callback[str] | None = None,
    ) -> CommandResult:
        """Runs a program to its end: a list is its arguments, text is for `/bin/sh -c`.

        `timeout` kills it in the sandbox. With a callback, output comes as it is written.
        """
        given, encoding = (None, None) if stdin is None else pack(stdin)
        body = exec_body(
            command,
            env=env,
            cwd=cwd,
            user=user,
            stdin=given,
            stdinEncoding=encoding,
            timeout=None if timeout is None else duration(timeout),
            outputLimit=output_limit,
        )
        request = Request("POST", self._transport.path(*self._parent), body=body, waits=True)
        if on_stdout is None and on_stderr is None:
            return CommandResult.from_wire(await self._transport.json(request))
        return await self._process(None, output_limit, request).wait(on_stdout=on_stdout, on_stderr=on_stderr)

    def stream(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: Duration | None = None,
        output_limit: int | None = None,
    ) -> AsyncProcess:
        """A program whose output is iterated over; it is started by the first step."""
        given, encoding = (None, None) if stdin is None else pack(stdin)
        body = exec_body(
            command,
            env=env,
            cwd=cwd,
            user=user,
            stdin=given,
            stdinEncoding=encoding,
            timeout=None if timeout is None else duration(timeout),
        )
        return self._process(
            None, output_limit, Request("POST", self._transport.path(*self._parent), body=body)
        )

    async def start(
        self,
        command: Command,
        *,
        id: str | None = None,  # noqa: A002 # as the API calls it
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout: Duration | None = None,
        output_limit: int | None = None,
    ) -> AsyncProcess:
        """Starts a program in the background. With `stdin` its input stays open for `write`.

        The sandbox keeps the last 256 KiB of each output for those who come later.
        """
        body = exec_body(
            command,
            id=id,
            env=env,
            cwd=cwd,
            user=user,
            openStdin=stdin or None,
            timeout=None if timeout is None else duration(timeout),
            background=True,
        )
        return AsyncProcess(*await self._start(body, output_limit))

    async def pty(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
    ) -> AsyncTerminal:
        """Starts a program on a terminal; bash, or sh, unless you name one."""
        body = exec_body(
            'exec "$(command -v bash || command -v sh)"' if command is None else command,
            env={"TERM": "xterm-256color", **(env or {})},
            cwd=cwd,
            user=user,
            openStdin=True,
            tty=True,
            rows=rows,
            cols=cols,
            timeout=None if timeout is None else duration(timeout),
            background=True,
        )
        return AsyncTerminal(*await self._start(body, None))

    async def _start(self, body: Mapping[str, Any], limit: int | None) -> tuple[AsyncFollower, Collector]:
        started = await self._transport.json(Request("POST", self._transport.path(*self._parent), body=body))
        collector = Collector(limit)
        follower = AsyncFollower(self._transport, self._parent, PLACES, collector, started["id"])
        follower.started = started
        return follower, collector

    def _process(self, name: str | None, limit: int | None, opening: Request | None) -> AsyncProcess:
        collector = Collector(limit)
        return AsyncProcess(
            AsyncFollower(self._transport, self._parent, PLACES, collector, name), collector, opening
        )

    def connect(self, id: str, *, output_limit: int | None = None) -> AsyncProcess:  # noqa: A002
        """A process that was started before, also by others; its output is read from the beginning."""
        return self._process(id, output_limit, None)

    async def list(self) -> builtins.list[ProcessInfo]:
        """Processes that were started and not released."""
        found = await self._transport.json(Request("GET", self._transport.path(*self._parent)))
        return [ProcessInfo.from_wire(each) for each in found["items"]]
