"""Ways to a server: TCP with a key, TLS with an authority of one's own; and many at once."""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_run import AgentRun, AsyncAgentRun, ConnectionLostError, ProtocolError, Sandbox, errors

from .daemon import Daemon


def test_key(daemon: Daemon) -> None:
    url, ca = f"https://{daemon.address}", daemon.ca_file
    with AgentRun(url, api_key=daemon.api_key, ca_file=ca) as client:
        assert client.version().api == "v1"
        with client.create("python-agent-pool") as sandbox:
            assert sandbox.exec("print('over TLS')").stdout == "over TLS\n"
            (fork,) = sandbox.fork()
            # A token opens its own sandbox, and no other.
            assert sandbox.token
            assert sandbox.token not in repr(sandbox)
            with AgentRun(url, api_key=sandbox.token, ca_file=ca) as holder:
                assert Sandbox(holder, sandbox.name, sandbox.id).exec("1 + 1").text == "2"
                with pytest.raises(errors.ApiError):
                    Sandbox(holder, fork.name, fork.id).exec("1 + 1")
            assert fork.token
            assert fork.token != sandbox.token
            fork.terminate()
        assert daemon.api_key not in repr(client)
    for key in (None, "wrong"):
        with AgentRun(url, api_key=key, ca_file=ca) as client:
            with pytest.raises(errors.UnauthenticatedError) as refused:
                client.list()
            assert refused.value.status == 401


class Versions(http.server.BaseHTTPRequestHandler):
    """Answers as a daemon does, or not."""

    answer = b'{"version": "1", "api": "v1"}'

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer key" else 502)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of a server, and the file of its authority."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Versions) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}", str(certificate)
        server.shutdown()
        thread.join()


def test_authority(tls: tuple[str, str]) -> None:
    url, authority = tls
    with AgentRun(url, api_key="key", ca_file=authority) as client:
        assert client.version().version == "1"
    with (
        AgentRun(url, api_key="key", retry_for=0) as client,
        pytest.raises(ConnectionLostError, match="CERTIFICATE"),
    ):
        client.version()
    # Something that is no daemon is told apart.
    with (
        AgentRun(url, api_key="other", ca_file=authority) as client,
        pytest.raises(ProtocolError, match="502"),
    ):
        client.version()


def test_not_json(tls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Versions, "answer", b"<html>")
    with (
        AgentRun(tls[0], api_key="key", ca_file=tls[1]) as client,
        pytest.raises(ProtocolError, match="not JSON"),
    ):
        client.version()
    # A stream of what is not events.
    monkeypatch.setattr(Versions, "answer", json.dumps(["a"]).encode() + b"\n")
    with AgentRun(tls[0], api_key="key", ca_file=tls[1]) as client:
        process = Sandbox(client, "name", "id").commands.connect("x")
        with pytest.raises(ProtocolError, match="without a type"):
            process.wait()


async def test_many_tasks(daemon: Daemon) -> None:  # noqa: ARG001
    async with AsyncAgentRun() as client, await client.create("python-agent-pool") as sandbox:
        heard: list[str] = []

        async def hear(text: str) -> None:
            await asyncio.sleep(0)
            heard.append(text)

        results = await asyncio.gather(*(sandbox.run(["echo", str(n)], on_stdout=hear) for n in range(12)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(12)]
        assert sorted(heard) == sorted(f"{n}\n" for n in range(12))

        async def pieces() -> AsyncIterator[bytes]:
            for part in ("a", "b"):
                await asyncio.sleep(0)
                yield part.encode()

        assert await sandbox.files.write("pieces", pieces()) == 2


async def test_cancelled(daemon: Daemon) -> None:  # noqa: ARG001
    """Who stops waiting leaves a client that works."""
    async with AsyncAgentRun() as client, await client.create("python-agent-pool") as sandbox:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sandbox.run("echo $$ > pid; sleep 600"), 1)
        assert (await sandbox.run("kill $(cat pid); echo killed")).stdout == "killed\n"


def test_many_threads(daemon: Daemon) -> None:  # noqa: ARG001
    with (
        AgentRun() as client,
        client.create("python-agent-pool") as sandbox,
        ThreadPoolExecutor(8) as threads,
    ):
        results = list(threads.map(lambda n: sandbox.run(["echo", str(n)]).stdout, range(16)))
    assert results == [f"{n}\n" for n in range(16)]


def test_daemon_that_says_goodbye(daemon: Daemon) -> None:
    """One that is told to end tells its streams so; the next one has the rest."""
    with AgentRun() as client, client.create("python-agent-pool") as sandbox:
        process = sandbox.commands.start("echo begun; read line; echo $line; exit 3", stdin=True)
        assert next(iter(process)).text == "begun\n"
        daemon.down()
        daemon.up()
        process.write("goes on\n")
        result = process.wait()
        assert (result.exit_code, result.stdout) == (3, "begun\ngoes on\n")
