# Made by generate.py of tests/asynchronous/test_lost.py: change that one.
"""Connections that break: what is repeated, what never is, and what goes on."""

from __future__ import annotations

import pytest

from agent_run import AgentRun, ConnectionLostError, Output, Sandbox, errors

from ..daemon import Daemon
from ..proxy import Proxy

WAITS = """
import os, time
print("begun")
while not os.path.exists("mark"):
    time.sleep(0.02)
"end"
"""


def test_create_is_repeated_with_its_key(client: AgentRun, proxy: Proxy) -> None:
    with AgentRun(proxy.url) as breaking:
        proxy.breaks = 2
        sandbox = breaking.create("python-agent-pool", metadata={"mark": proxy.url})
        assert proxy.requests == ["POST /v1/namespaces/default/sandboxes"] * 3
        assert len(proxy.keys) == 3
        assert len(set(proxy.keys)) == 1
        made = [info for info in client.list() if info.metadata.get("mark") == proxy.url]
        assert [info.id for info in made] == [sandbox.id]

        proxy.requests.clear()
        proxy.breaks = 1
        forks = sandbox.fork(2)
        assert proxy.requests == [f"POST /v1/namespaces/default/sandboxes/{sandbox.name}/forks"] * 2
        children = [info for info in client.list() if info.parent == sandbox.id]
        assert {info.id for info in children} == {fork.id for fork in forks}
        for each in (sandbox, *forks):
            each.terminate()
        assert len(set(proxy.keys)) == 2


def test_same_key_is_the_same_sandbox(client: AgentRun) -> None:
    key = "the-key-of-" + (client.version()).version
    first = client.create("python-agent-pool", idempotency_key=key)
    again = client.create("python-agent-pool", idempotency_key=key)
    assert first.id == again.id
    with pytest.raises(errors.ConflictError):
        client.create("python-agent-pool", name="another", idempotency_key=key)
    first.terminate()


def test_exec_is_never_repeated(sandbox: Sandbox, proxy: Proxy) -> None:
    with AgentRun(proxy.url) as breaking:
        broken = breaking.get(sandbox.name)
        proxy.requests.clear()
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError, match="broke") as lost:
            broken.run("echo run >> once")
        assert lost.value.sent
        assert isinstance(lost.value, ConnectionError)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            broken.exec("echo exec >> once")
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            broken.code.run("print('code', file=open('once', 'a'))", on_stdout=print)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            broken.commands.start("echo start >> once")
        assert [request.rsplit("/", 1)[1] for request in proxy.requests] == ["execs", "code", "code", "execs"]
    # What the context has run before this has ended.
    sandbox.exec("1")
    for process in sandbox.commands.list():
        sandbox.commands.connect(process.id).wait()
    assert sorted((sandbox.files.read("once")).split()) == ["code", "exec", "run", "start"]


def test_write_is_never_repeated(sandbox: Sandbox, proxy: Proxy) -> None:
    with AgentRun(proxy.url) as breaking:
        broken = breaking.get(sandbox.name)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            broken.files.write("log", "line\n", append=True)
    assert sandbox.files.read("log") == "line\n"


def test_read_is_repeated(sandbox: Sandbox, proxy: Proxy) -> None:
    sandbox.files.write("to-read", "contents")
    with AgentRun(proxy.url) as breaking:
        proxy.breaks = 1
        broken = breaking.get(sandbox.name)
        proxy.breaks = 1
        assert broken.files.read("to-read") == "contents"


def test_nobody_answers(proxy: Proxy) -> None:
    proxy.close()
    with AgentRun(proxy.url, retry_for=0.1) as client:
        with pytest.raises(ConnectionLostError, match="cannot be reached") as lost:
            client.create("python-agent-pool")
        assert not lost.value.sent


def test_stream_goes_on_over_new_connections(sandbox: Sandbox, proxy: Proxy) -> None:
    with AgentRun(proxy.url) as breaking:
        broken = breaking.get(sandbox.name)
        proxy.requests.clear()
        proxy.breaks, proxy.after = 3, 40_000
        result = broken.commands.stream("seq 1 30000").wait()
        assert result.stdout.split() == [str(n) for n in range(1, 30001)]
        assert not result.truncated
        assert [request.split()[0] for request in proxy.requests] == ["POST", "GET", "GET", "GET"]

        proxy.requests.clear()
        proxy.breaks, proxy.after = 2, 50_000
        execution = broken.code.stream(
            "for n in range(20000): print(n)\nfor n in range(300): display(n)\n'end'"
        )
        values = [event.value.text for event in execution if not isinstance(event, Output) and event.value]
        assert values == [*(str(n) for n in range(300)), "'end'"]
        result_of_code = execution.wait()
        assert result_of_code.stdout.split() == [str(n) for n in range(20000)]
        assert not result_of_code.truncated
        assert [request.split()[0] for request in proxy.requests] == ["POST", "GET", "GET"]


def test_what_nobody_read_is_told(sandbox: Sandbox) -> None:
    process = sandbox.commands.start("seq 1 100000")
    # Its end comes after all of its output, of which the sandbox keeps 256 KiB.
    sandbox.run(f"while [ -e /proc/{process.pid} ]; do sleep 0.01; done")
    result = process.wait()
    assert result.truncated
    assert result.stdout.endswith("99999\n100000\n")


def test_daemon_restarts(daemon: Daemon, client: AgentRun, sandbox: Sandbox) -> None:
    process = sandbox.commands.stream(
        "echo begun; until [ -e mark ]; do sleep 0.02; done; echo goes on; exit 6"
    )
    code = sandbox.code.start(WAITS)
    output = iter(process)
    assert (next(output)).text == "begun\n"
    with sandbox.files.watch() as changes:
        daemon.kill()
        daemon.up()
        # Only after the watch is back is there something to be seen.
        assert (next(iter(changes))).type == "overflow"
        sandbox.files.write("mark", "")
        for change in changes:
            if change.path == "/workspace/mark":
                break
    result = process.wait()
    assert (result.exit_code, result.stdout) == (6, "begun\ngoes on\n")
    ended = code.wait()
    assert (ended.text, ended.stdout) == ("'end'", "begun\n")
    assert (client.get(sandbox.name)).id == sandbox.id
