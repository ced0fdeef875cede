# Made by generate.py of src/agent_run/_async/commands.py: change that one.
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
from .follow import Follower, Reader
from .transport import Request, Transport

# A list is a program and its arguments, text is for `/bin/sh -c`.
Command = str | Sequence[str]

PLACES = {"stdout": 0, "stderr": 0}


def exec_body(command: Command, **fields: Any) -> dict[str, Any]:
    """The body of a request that starts a program."""
    form = {"shell": command} if isinstance(command, str) else {"argv": list(command)}
    return compact({**form, **fields})


class Process(Reader[Output]):
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

    def wait(
        self, *, on_stdout: _io.Callback[str] | None = None, on_stderr: _io.Callback[str] | None = None
    ) -> CommandResult:
        """Reads to its end. The result has what was read of its output by this object."""
        for piece in self:
            _io.call(on_stdout if piece.stream == "stdout" else on_stderr, piece.text)
        if self._follower.end is None:
            raise ProtocolError("the process has no end")
        return self._collector.command(self.id, self._follower.end)

    def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Writes to its standard input; returns when it was taken."""
        self._input(data, close=close)

    def close_stdin(self) -> None:
        """Ends its standard input. A terminal gets Ctrl-D."""
        self._input(b"", close=True)

    def _input(self, data: Content, *, close: bool) -> None:
        query = {"close": "true"} if close else None
        self._follower.transport.send(
            Request("POST", self._follower.path("stdin"), query, content=_io.upload(data))
        )

    def signal(self, signal: str | int, *, scope: SignalScope = "process") -> None:
        """Sends a signal: a name such as `TERM`, or a number."""
        self._follower.transport.send(
            Request("POST", self._follower.path("signal"), body={"signal": str(signal), "scope": scope})
        )

    def kill(self) -> None:
        """Kills it and all of its session."""
        self.signal("KILL", scope="session")

    def info(self) -> ProcessInfo:
        return ProcessInfo.from_wire(self._follower.transport.json(Request("GET", self._follower.path())))

    def release(self) -> None:
        """Forgets it and its output, once it has ended."""
        self._follower.transport.send(Request("DELETE", self._follower.path()))

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cursor is not None:
            self._cursor.close()
        if self._follower.id is None or self._follower.end is not None:
            return
        try:
            if (self.info()).running:
                self.kill()
        except (ConflictError, NotFoundError, SandboxEndedError):
            pass  # it ended by itself, or with its sandbox


class Terminal(Process):
    """A program on a terminal; all of its output is stdout."""

    def resize(self, rows: int, cols: int) -> None:
        self._follower.transport.send(
            Request("POST", self._follower.path("resize"), body={"rows": rows, "cols": cols})
        )

    def __enter__(self) -> Terminal:
        return self


class Commands:
    """Programs of one sandbox. None is ever started twice, whatever happens to the connection."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._parent = ("sandboxes", sandbox, "execs")

    def run(
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
            return CommandResult.from_wire(self._transport.json(request))
        return self._process(None, output_limit, request).wait(on_stdout=on_stdout, on_stderr=on_stderr)

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
    ) -> Process:
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

    def start(
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
    ) -> Process:
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
        return Process(*self._start(body, output_limit))

    def pty(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
    ) -> Terminal:
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
        return Terminal(*self._start(body, None))

    def _start(self, body: Mapping[str, Any], limit: int | None) -> tuple[Follower, Collector]:
        started = self._transport.json(Request("POST", self._transport.path(*self._parent), body=body))
        collector = Collector(limit)
        follower = Follower(self._transport, self._parent, PLACES, collector, started["id"])
        follower.started = started
        return follower, collector

    def _process(self, name: str | None, limit: int | None, opening: Request | None) -> Process:
        collector = Collector(limit)
        return Process(Follower(self._transport, self._parent, PLACES, collector, name), collector, opening)

    def connect(self, id: str, *, output_limit: int | None = None) -> Process:  # noqa: A002
        """A process that was started before, also by others; its output is read from the beginning."""
        return self._process(id, output_limit, None)

    def list(self) -> builtins.list[ProcessInfo]:
        """Processes that were started and not released."""
        found = self._transport.json(Request("GET", self._transport.path(*self._parent)))
        return [ProcessInfo.from_wire(each) for each in found["items"]]
