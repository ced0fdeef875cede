"""What the daemon tells, as types."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from ._wire import instant, seconds, unpack
from .errors import FailedError

State = Literal["Running", "Paused", "Hibernating", "Hibernated", "Resuming", "Ended"]
OnTimeout = Literal["kill", "pause", "hibernate"]
Language = Literal["python", "bash", "node"]
SignalScope = Literal["process", "group", "session"]
Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Inject:
    """Keeps a value outside of a sandbox: it is put into a header of requests to one host, over
    TLS on port 443. The sandbox's template needs `trustNamespaceCA`."""

    host: str
    header: str
    format: str | None = None  # the header with {} for the value, such as "Bearer {}"


@dataclass(frozen=True)
class SecretRef:
    """A value of a secret that the daemon keeps, as an environment variable of a sandbox.

    With `inject` the variable has a placeholder, which is all that the sandbox ever holds.
    """

    name: str  # of the secret
    key: str
    env: str | None = None  # the variable; the key unless you name one
    inject: Inject | None = None

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"name": self.name, "key": self.key}
        if self.env is not None:
            wire["env"] = self.env
        if self.inject is not None:
            wire["inject"] = {"host": self.inject.host, "header": self.inject.header}
            if self.inject.format is not None:
                wire["inject"]["format"] = self.inject.format
        return wire

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> SecretRef:
        i = d.get("inject")
        inject = None if i is None else Inject(i["host"], i["header"], i.get("format"))
        return cls(d["name"], d["key"], d.get("env"), inject)


Egress = Literal["deny", "allow"]


@dataclass(frozen=True)
class NetworkPolicy:
    """What a sandbox may connect to. The more precise rule decides, and deny before allow
    at equal precision.

    A rule is `[tcp://|udp://]HOST[:PORT]`; HOST is a name, a wildcard such as
    `*.example.org`, an address or a range of addresses.
    """

    egress: Egress = "deny"  # where no rule matches; "allow" opens the public internet
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()

    def to_wire(self) -> dict[str, Any]:
        return {"egress": self.egress, "allow": list(self.allow), "deny": list(self.deny)}

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> NetworkPolicy:
        return cls(d.get("egress", "deny"), tuple(d.get("allow", ())), tuple(d.get("deny", ())))


@dataclass(frozen=True)
class NetworkPolicies:
    """All policies that hold for a sandbox. Each of them must allow a connection."""

    own: NetworkPolicy | None  # without one its bounds alone hold
    bounds: tuple[NetworkPolicy, ...]  # of its template, and of what it was forked from

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> NetworkPolicies:
        own = d.get("networkPolicy")
        return cls(
            own=None if own is None else NetworkPolicy.from_wire(own),
            bounds=tuple(NetworkPolicy.from_wire(each) for each in d.get("networkBounds", ())),
        )


@dataclass(frozen=True)
class NetworkEntry:
    """A connection of a sandbox, or one that was refused."""

    seq: int | None  # counts up from 1; None for a connection that is open
    time: datetime  # when it was asked for
    ended: datetime | None
    protocol: str  # tcp, udp or dns
    name: str | None  # what it was for, if that is known
    address: str | None  # with the port
    remote: str | None  # what was connected to instead, if the name has moved
    sent: int  # bytes, as the sandbox sees them
    received: int
    rule: str | None  # which decided
    kind: str | None  # of the rule
    reason: str | None
    outcome: str  # open, closed, reset by remote, reset by sandbox, refused, failed or cut
    repeated: int  # how many further attempts were refused in the same way

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> NetworkEntry:
        return cls(
            seq=d.get("seq"),
            time=instant(d["time"]),
            ended=instant(d["ended"]) if "ended" in d else None,
            protocol=d["protocol"],
            name=d.get("name"),
            address=d.get("address"),
            remote=d.get("remote"),
            sent=d.get("sent", 0),
            received=d.get("received", 0),
            rule=d.get("rule"),
            kind=d.get("kind"),
            reason=d.get("reason"),
            outcome=d["outcome"],
            repeated=d.get("repeated", 0),
        )


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox, at the time of asking."""

    namespace: str
    name: str
    id: str
    state: State
    pool: str
    template: str
    revision: str
    engine: str
    workdir: str
    memory: int
    created: datetime
    metadata: Mapping[str, str]
    user: str | None
    parent: str | None  # id of the sandbox that it continues from
    fork: str | None  # name of the fork that made it
    checkpoint: str | None  # name of the checkpoint that it was restored from
    ended: datetime | None
    reason: str | None  # why it has ended
    detail: str | None
    unresponsive: str | None  # why its machine, which runs, is not reached
    timeout: float | None  # seconds
    idle_timeout: float | None
    on_timeout: OnTimeout | None
    secrets: tuple[SecretRef, ...]  # which it holds; never a value
    secrets_by: str | None  # who has supplied them, and may fork it
    network: NetworkPolicies
    resource_version: str  # the number of its last change

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> SandboxInfo:
        return cls(
            namespace=d["namespace"],
            name=d["name"],
            id=d["id"],
            state=d["state"],
            pool=d["pool"],
            template=d["template"],
            revision=d["revision"],
            engine=d["engine"],
            workdir=d["workdir"],
            memory=d["memory"],
            created=instant(d["created"]),
            metadata=d.get("metadata", {}),
            user=d.get("user"),
            parent=d.get("parent"),
            fork=d.get("fork"),
            checkpoint=d.get("checkpoint"),
            ended=instant(d["ended"]) if "ended" in d else None,
            reason=d.get("reason"),
            detail=d.get("detail"),
            unresponsive=d.get("unresponsive"),
            timeout=seconds(d["timeout"]) if "timeout" in d else None,
            idle_timeout=seconds(d["idleTimeout"]) if "idleTimeout" in d else None,
            on_timeout=d.get("onTimeout"),
            secrets=tuple(SecretRef.from_wire(s) for s in d.get("secrets", ())),
            secrets_by=d.get("secretsBy"),
            network=NetworkPolicies.from_wire(d),
            resource_version=d["resourceVersion"],
        )


@dataclass(frozen=True)
class SandboxEvent:
    """What a watch of sandboxes tells.

    `object`: a sandbox as it is. `deleted`: one as it ended. `synced`: all that there were
    have been told of. `reset`: nobody knows what has changed; all are told of again.
    """

    type: Literal["object", "deleted", "synced", "reset"]
    sandbox: SandboxInfo | None  # of an object, and of one that was deleted


@dataclass(frozen=True)
class Checkpoint:
    """A sandbox as it was at one instant, on disk."""

    namespace: str
    name: str
    id: str
    source: str
    source_id: str
    pool: str
    template: str
    revision: str
    engine: str
    workdir: str
    user: str | None
    memory: int  # bytes that a sandbox restored from it reserves
    created: datetime
    size: int  # bytes on disk of all that it is made of
    unshared: int  # what of that deleting it frees

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> Checkpoint:
        return cls(
            namespace=d["namespace"],
            name=d["name"],
            id=d["id"],
            source=d["source"],
            source_id=d["sourceID"],
            pool=d["pool"],
            template=d["template"],
            revision=d["revision"],
            engine=d["engine"],
            workdir=d["workdir"],
            user=d.get("user"),
            memory=d["memory"],
            created=instant(d["created"]),
            size=d["size"],
            unshared=d["unshared"],
        )


@dataclass(frozen=True)
class Output:
    """A piece of what a process or code writes."""

    stream: Stream
    data: bytes
    offset: int  # of its first byte in the stream

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True)
class _Outputs:
    """What both kinds of results have."""

    id: str
    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    truncated: bool  # that stdout or stderr is not all of it
    timed_out: bool
    wall: float  # seconds

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class CommandResult(_Outputs):
    """A process that has ended."""

    signal: str | None  # such as SIGKILL, if one ended it
    max_rss: int | None

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> CommandResult:
        return cls(
            id=d["id"],
            exit_code=d["exitCode"],
            stdout_bytes=unpack(d["stdout"], d.get("stdoutEncoding")),
            stderr_bytes=unpack(d["stderr"], d.get("stderrEncoding")),
            truncated=d["truncated"],
            timed_out=d.get("timedOut", False),
            wall=seconds(d["wall"]),
            signal=d.get("signal"),
            max_rss=d.get("maxRSS"),
        )

    def check(self) -> CommandResult:
        """This result, if it worked; `FailedError` otherwise."""
        if not self.ok:
            raise FailedError(f"the command ended with {self.exit_code}: {_tail(self.stderr)}", self)
        return self


def _tail(text: str) -> str:
    return text.strip()[-2000:] or "it wrote nothing to stderr"


@dataclass(frozen=True)
class ProcessInfo:
    """A process that was started and not released."""

    id: str
    pid: int
    argv: list[str]
    cwd: str
    user: str | None
    tty: bool
    started: datetime
    running: bool
    exit_code: int | None
    signal: str | None
    timed_out: bool

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> ProcessInfo:
        return cls(
            id=d["id"],
            pid=d["pid"],
            argv=d["argv"],
            cwd=d["cwd"],
            user=d.get("user"),
            tty=d["tty"],
            started=instant(d["started"]),
            running=d["running"],
            exit_code=d.get("exitCode"),
            signal=d.get("signal"),
            timed_out=d.get("timedOut", False),
        )


class Mime(Mapping[str, str]):
    """One value in several forms, by MIME type, as the kernel has sent it: text, or base64."""

    def __init__(self, forms: Mapping[str, str]) -> None:
        self._forms = dict(forms)

    def __getitem__(self, kind: str) -> str:
        return self._forms[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def __repr__(self) -> str:
        return f"Mime({self.text!r}, forms={list(self._forms)})"

    @property
    def text(self) -> str | None:
        return self._forms.get("text/plain")

    @property
    def html(self) -> str | None:
        return self._forms.get("text/html")

    @property
    def json(self) -> Any:
        form = self._forms.get("application/json")
        return None if form is None else json.loads(form)

    @property
    def png(self) -> bytes | None:
        return self._binary("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self._binary("image/jpeg")

    @property
    def svg(self) -> str | None:
        return self._forms.get("image/svg+xml")

    def _binary(self, kind: str) -> bytes | None:
        form = self._forms.get(kind)
        return None if form is None else base64.b64decode(form)


@dataclass(frozen=True)
class CodeError:
    """An exception of the code."""

    name: str
    value: str
    traceback: str

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> CodeError:
        return cls(name=d["name"], value=d["value"], traceback=d["traceback"])


CodeStatus = Literal["ok", "raised", "interrupted", "exited", "died", "cancelled"]


@dataclass(frozen=True)
class CodeResult(_Outputs):
    """Code that has ended."""

    context: str
    status: CodeStatus
    result: Mime | None  # the value of the last expression
    displays: list[Mime]  # what was displayed, charts among it
    error: CodeError | None
    fresh: bool  # that the kernel was started for it
    fresh_reason: str | None  # how the kernel before ended
    reason: str | None  # of what the kernel died
    language: str  # what ran it; "shell" for a text that is a command
    count: int  # of executions in this kernel

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> CodeResult:
        return cls(
            id=d["id"],
            exit_code=d["exitCode"],
            stdout_bytes=unpack(d["stdout"], d.get("stdoutEncoding")),
            stderr_bytes=unpack(d["stderr"], d.get("stderrEncoding")),
            truncated=d["truncated"],
            timed_out=d.get("timedOut", False),
            wall=seconds(d["wall"]),
            context=d["context"],
            status=d["status"],
            result=Mime(d["result"]) if "result" in d else None,
            displays=[Mime(each) for each in d["displays"]],
            error=CodeError.from_wire(d["error"]) if "error" in d else None,
            fresh=d.get("fresh", False),
            fresh_reason=d.get("freshReason"),
            reason=d.get("reason"),
            language=d["language"],
            count=d.get("count", 0),
        )

    @property
    def kind(self) -> str:
        """What a text was: `python` or `shell`."""
        return self.language

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return None if self.result is None else self.result.text

    @property
    def charts(self) -> list[bytes]:
        """All pictures, as PNG."""
        shown = [*self.displays, *([self.result] if self.result else [])]
        return [png for each in shown if (png := each.png) is not None]

    def check(self) -> CodeResult:
        """This result, if it worked; `FailedError` otherwise."""
        if self.ok:
            return self
        why = self.error.traceback if self.error else self.reason or self.stderr
        raise FailedError(f"the code ended with {self.exit_code} ({self.status}): {_tail(why)}", self)


@dataclass(frozen=True)
class CodeEvent:
    """Something that code has shown besides output."""

    kind: Literal["begun", "result", "display", "raised"]
    seq: int
    value: Mime | None = None
    error: CodeError | None = None


@dataclass(frozen=True)
class CodeContext:
    """A kernel with its own variables."""

    id: str
    language: str
    cwd: str
    user: str | None
    pid: int | None  # of its kernel, if one runs
    version: str | None
    running: str | None  # id of the execution under way
    queued: int

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> CodeContext:
        return cls(
            id=d["id"],
            language=d["language"],
            cwd=d["cwd"],
            user=d.get("user"),
            pid=d.get("pid"),
            version=d.get("version"),
            running=d.get("running"),
            queued=d["queued"],
        )


FileType = Literal["file", "folder", "symlink", "fifo", "socket", "char_device", "block_device"]


@dataclass(frozen=True)
class FileInfo:
    """A file of a sandbox."""

    path: str
    type: FileType
    mode: int
    size: int
    uid: int
    gid: int
    owner: str | None
    group: str | None
    modified: datetime
    target: str | None  # of a symlink

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> FileInfo:
        return cls(
            path=d["path"],
            type=d["type"],
            mode=int(d["mode"], 8),
            size=d["size"],
            uid=d["uid"],
            gid=d["gid"],
            owner=d.get("owner"),
            group=d.get("group"),
            modified=instant(d["modified"]),
            target=d.get("target"),
        )


WatchKind = Literal["create", "write", "remove", "rename", "moved_to", "chmod", "close", "overflow", "gone"]


@dataclass(frozen=True)
class WatchEvent:
    """A change of a file. `overflow` says that changes were missed: look again at everything."""

    type: WatchKind
    path: str | None
    folder: bool
    cookie: int | None  # pairs rename with moved_to

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> WatchEvent:
        return cls(type=d["type"], path=d.get("path"), folder=d.get("folder", False), cookie=d.get("cookie"))


@dataclass(frozen=True)
class Version:
    """The daemon's version."""

    version: str
    api: str
    endpoint: str | None

    @classmethod
    def from_wire(cls, d: Mapping[str, Any]) -> Version:
        return cls(version=d["version"], api=d["api"], endpoint=d.get("endpoint"))
