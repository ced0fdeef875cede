# Made by generate.py of src/agent_run/_async/sandbox.py: change that one.
"""A sandbox, and the client that makes and finds sandboxes."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from .._config import discover
from .._http import Patience
from .._wire import Duration, compact, duration, new_key
from ..errors import (
    ConnectionLostError,
    ForkIncompleteError,
    NotFoundError,
    OtherStateError,
    SandboxEndedError,
    ShuttingDownError,
    TooOldError,
    from_wire,
)
from ..models import (
    Checkpoint,
    CodeContext,
    CodeResult,
    CommandResult,
    NetworkPolicy,
    OnTimeout,
    SandboxEvent,
    SandboxInfo,
    SecretRef,
    Version,
)
from . import _io
from .code import Code
from .commands import Command, Commands, Terminal
from .files import Files
from .network import Network
from .transport import Request, Transport


class Sandbox:
    """A machine of its own that runs what you send it, and can be forked.

    Leaving the context terminates it.
    """

    def __init__(self, client: AgentRun, name: str, id: str, token: str | None = None) -> None:  # noqa: A002
        """`token` gives access to what is inside of this one sandbox; who has made it gets it."""
        self.client = client
        self.token = token
        self.name = name
        self.id = id
        self.commands = Commands(client._transport, name)
        self.code = Code(client._transport, name)
        self.files = Files(client._transport, name)
        self.network = Network(client._transport, name)
        self._transport = client._transport
        client._users.add(id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.id}) at {self._transport.endpoint}>"

    @classmethod
    def create(
        cls,
        pool: str,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[SecretRef] | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        on_timeout: OnTimeout | None = None,
        network_policy: NetworkPolicy | None = None,
        client: AgentRun | None = None,
    ) -> Sandbox:
        """Claims a sandbox of a pool, at the server that `AsyncAgentRun()` finds unless you give a client."""
        own = client is None
        if client is None:
            client = AgentRun()
            client._close_with_last = True
        try:
            return client.create(
                pool,
                name=name,
                env=env,
                secrets=secrets,
                metadata=metadata,
                timeout=timeout,
                idle_timeout=idle_timeout,
                on_timeout=on_timeout,
                network_policy=network_policy,
            )
        except BaseException:
            if own:
                client.close()
            raise

    def exec(
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
        """Runs text: Python in the warmed kernel, or a command; `kind` of the result tells which.

        It is Python if it parses and every name that it reads is bound or built in; a command
        if its first word is one; and Python otherwise. `run` and `code.run` never guess.
        """
        return self.code.run_text(
            text,
            context=context,
            env=env,
            timeout=timeout,
            output_limit=output_limit,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

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
        """Runs a program to its end: a list is its arguments, text is for `/bin/sh -c`."""
        return self.commands.run(
            command,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            timeout=timeout,
            output_limit=output_limit,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

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
        return self.commands.pty(command, rows=rows, cols=cols, env=env, cwd=cwd, user=user, timeout=timeout)

    def fork(
        self,
        n: int = 1,
        *,
        name: str | None = None,
        network_policy: NetworkPolicy | None = None,
        idempotency_key: str | None = None,
    ) -> list[Sandbox]:
        """Sandboxes that continue from this one, all from the same instant: memory, files, kernels.

        They may connect to what this one may; `network_policy` narrows that.
        """
        made = self._transport.json(
            Request(
                "POST",
                self._path("forks"),
                body=compact({"name": name, "replicas": n, "networkPolicy": _policy(network_policy)}),
                key=idempotency_key or new_key(),
            )
        )
        children = [
            Sandbox(self.client, c["name"], c["id"], c.get("token")) for c in made["children"] if c.get("id")
        ]
        problems = {c["name"]: c.get("problem", "") for c in made["children"] if not c.get("id")}
        if problems:
            raise ForkIncompleteError(made["name"], children, problems)
        return children

    def checkpoint(self, name: str | None = None, *, idempotency_key: str | None = None) -> Checkpoint:
        """Writes it to disk, as it is, under a name. It goes on; `client.restore` continues from there."""
        made = self._transport.json(
            Request(
                "POST",
                self._path("checkpoints"),
                body=compact({"name": name}),
                key=idempotency_key or new_key(),
            )
        )
        return Checkpoint.from_wire(made)

    def info(self) -> SandboxInfo:
        """The sandbox as it is now. Asking does not wake it."""
        return SandboxInfo.from_wire(self._transport.json(Request("GET", self._path())))

    def pause(self) -> SandboxInfo:
        """Stops its processors; it keeps its memory. What needs it wakes it."""
        return self._do("pause")

    def resume(self) -> SandboxInfo:
        """Lets it go on."""
        return self._do("resume")

    def hibernate(self) -> SandboxInfo:
        """Writes it to disk and frees its memory. What needs it wakes it."""
        return self._do("hibernate")

    def extend(self, timeout: Duration) -> SandboxInfo:
        """Gives it a timeout that counts from now on; 0 is none."""
        return self._do("extend", {"timeout": duration(timeout)})

    def _do(self, verb: str, body: Mapping[str, Any] | None = None) -> SandboxInfo:
        return SandboxInfo.from_wire(self._transport.json(Request("POST", self._path(verb), body=body)))

    def terminate(self) -> None:
        """Ends it. One that has ended already is no error."""
        try:
            self._transport.send(Request("DELETE", self._path()))
        except (SandboxEndedError, NotFoundError):
            pass
        finally:
            self.client._left(self.id)

    def kill(self) -> None:
        """Ends it: `terminate`."""
        self.terminate()

    def _path(self, *more: str) -> str:
        return self._transport.path("sandboxes", self.name, *more)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()


class AgentRun:
    """A client of one server and one namespace.

    Without arguments it finds its server by the environment (`AGENTRUN_SERVER`,
    `AGENTRUN_API_KEY`, `AGENTRUN_CA_FILE`), then by `~/.config/agentrun/config.yaml`, then by
    the local socket (in `AGENTRUN_STATE`, or where `agentrun up` has it).
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        ca_file: str | None = None,
        namespace: str = "default",
        timeout: float = 300.0,
        retry_for: float = 10.0,
    ) -> None:
        """`timeout` is what a request may take that runs nothing, and `retry_for` how long a
        broken connection is tried again where that is safe; both are seconds."""
        endpoint = discover(server, api_key, ca_file)
        self._transport = Transport(endpoint, namespace, timeout=timeout, retry_for=retry_for)
        # Who uses a client that was made for one sandbox and its forks.
        self._users: set[str] = set()
        self._close_with_last = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport.endpoint} namespace={self._transport.namespace}>"

    def create(
        self,
        pool: str,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[SecretRef] | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        on_timeout: OnTimeout | None = None,
        network_policy: NetworkPolicy | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Claims a sandbox of a pool; it has answered when this returns.

        `secrets` are values that the daemon keeps, as environment variables; one with `inject` is
        never inside, and put into requests on their way out.

        After `timeout`, or `idle_timeout` without use, `on_timeout` happens: kill, unless
        you say pause or hibernate.

        `network_policy` narrows what its template lets it connect to.
        """
        life = _life(name, env, metadata, timeout, idle_timeout, on_timeout)
        refs = None if secrets is None else [each.to_wire() for each in secrets]
        asked = {"pool": pool, "secrets": refs, "networkPolicy": _policy(network_policy), **life}
        return self._make(("sandboxes",), compact(asked), idempotency_key)

    def restore(
        self,
        checkpoint: str | Checkpoint,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        on_timeout: OnTimeout | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """A new sandbox that continues from a checkpoint; any number of them can be made."""
        life = _life(name, env, metadata, timeout, idle_timeout, on_timeout)
        return self._make(("checkpoints", _name(checkpoint), "restore"), life, idempotency_key)

    def _make(self, path: tuple[str, ...], body: Mapping[str, Any], key: str | None) -> Sandbox:
        request = Request("POST", self._transport.path(*path), body=body, key=key or new_key())
        made = self._transport.json(request)
        return Sandbox(self, made["name"], made["id"], made.get("token"))

    def checkpoints(self) -> builtins.list[Checkpoint]:
        """All checkpoints by name."""
        return [Checkpoint.from_wire(each) for each in self._pages("checkpoints", {})]

    def delete_checkpoint(self, checkpoint: str | Checkpoint) -> None:
        """Deletes a checkpoint. Sandboxes that were restored from it stay."""
        path = self._transport.path("checkpoints", _name(checkpoint))
        self._transport.send(Request("DELETE", path))

    def get(self, name: str) -> Sandbox:
        """A sandbox that is there. Looking for it does not wake it."""
        found = self._transport.json(Request("GET", self._transport.path("sandboxes", name)))
        return Sandbox(self, found["name"], found["id"])

    def list(self, *, ended: bool = False) -> builtins.list[SandboxInfo]:
        """All sandboxes by name, with those that have `ended` if you want."""
        found = self._pages("sandboxes", {"ended": str(ended).lower()})
        return [SandboxInfo.from_wire(each) for each in found]

    def watch(self) -> Generator[SandboxEvent, None]:
        """All sandboxes, an event of type `synced`, and from then on each change, without end.

        A connection that breaks is made again, and goes on where it was: each change is told
        once.
        """
        query = {"watch": "true"}
        patience = Patience(self._transport.retry_for)
        while True:
            request = Request("GET", self._transport.path("sandboxes"), query)
            try:
                with closing(self._transport.events(request)) as events:
                    for event in events:
                        patience.renew()
                        if event["type"] == "error":
                            raise from_wire(event.get("error"))
                        if event.get("id"):
                            query["resourceVersion"] = event["id"]
                        if event["type"] == "bookmark":
                            continue
                        found = event.get("sandbox")
                        yield SandboxEvent(event["type"], found and SandboxInfo.from_wire(found))
                problem: Exception = ConnectionLostError("the stream was cut off", sent=True)
            except (TooOldError, OtherStateError) as e:
                problem = e
                query.pop("resourceVersion", None)
            except (ConnectionLostError, ShuttingDownError) as e:
                problem = e
            if "resourceVersion" not in query:
                yield SandboxEvent("reset", None)
            pause = patience.pause()
            if pause is None:
                raise problem
            _io.sleep(pause)

    def _pages(self, kind: str, query: Mapping[str, str]) -> builtins.list[Any]:
        """All objects of a kind."""
        found: builtins.list[Any] = []
        query = {"limit": "1000", **query}
        while True:
            page = self._transport.json(Request("GET", self._transport.path(kind), query))
            found += page["items"]
            if not page.get("next"):
                return found
            query = {**query, "after": page["next"]}

    def version(self) -> Version:
        """The daemon's version."""
        return Version.from_wire(self._transport.json(Request("GET", "/v1/version")))

    def close(self) -> None:
        """Lets go of all connections. Sandboxes run on."""
        self._transport.close()

    def _left(self, sandbox: str) -> None:
        self._users.discard(sandbox)
        if self._close_with_last and not self._users:
            self.close()

    def __enter__(self) -> AgentRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _name(checkpoint: str | Checkpoint) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.name


def _policy(policy: NetworkPolicy | None) -> dict[str, Any] | None:
    return None if policy is None else policy.to_wire()


def _life(
    name: str | None,
    env: Mapping[str, str] | None,
    metadata: Mapping[str, str] | None,
    timeout: Duration | None,
    idle_timeout: Duration | None,
    on_timeout: OnTimeout | None,
) -> dict[str, Any]:
    """What a claim and a restored sandbox are given."""
    return compact(
        {
            "name": name,
            "env": env,
            "metadata": metadata,
            "timeout": None if timeout is None else duration(timeout),
            "idleTimeout": None if idle_timeout is None else duration(idle_timeout),
            "onTimeout": on_timeout,
        }
    )
