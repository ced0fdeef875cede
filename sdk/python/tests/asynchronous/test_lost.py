"""Connections that break: what is repeated, what never is, and what goes on."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, AsyncSandbox, ConnectionLostError, Output, errors

from ..daemon import Daemon
from ..proxy import Proxy

WAITS = """
import os, time
print("begun")
while not os.path.exists("mark"):
    time.sleep(0.02)
"end"
"""


async def test_create_is_repeated_with_its_key(client: AsyncAgentRun, proxy: Proxy) -> None:
    async with AsyncAgentRun(proxy.url) as breaking:
        proxy.breaks = 2
        sandbox = await breaking.create("python-agent-pool", metadata={"mark": proxy.url})
        assert proxy.requests == ["POST /v1/namespaces/default/sandboxes"] * 3
        assert len(proxy.keys) == 3
        assert len(set(proxy.keys)) == 1
        made = [info for info in await client.list() if info.metadata.get("mark") == proxy.url]
        assert [info.id for info in made] == [sandbox.id]

        proxy.requests.clear()
        proxy.breaks = 1
        forks = await sandbox.fork(2)
        assert proxy.requests == [f"POST /v1/namespaces/default/sandboxes/{sandbox.name}/forks"] * 2
        children = [info for info in await client.list() if info.parent == sandbox.id]
        assert {info.id for info in children} == {fork.id for fork in forks}
        for each in (sandbox, *forks):
            await each.terminate()
        assert len(set(proxy.keys)) == 2


async def test_same_key_is_the_same_sandbox(client: AsyncAgentRun) -> None:
    key = "the-key-of-" + (await client.version()).version
    first = await client.create("python-agent-pool", idempotency_key=key)
    again = await client.create("python-agent-pool", idempotency_key=key)
    assert first.id == again.id
    with pytest.raises(errors.ConflictError):
        await client.create("python-agent-pool", name="another", idempotency_key=key)
    await first.terminate()


async def test_exec_is_never_repeated(sandbox: AsyncSandbox, proxy: Proxy) -> None:
    async with AsyncAgentRun(proxy.url) as breaking:
        broken = await breaking.get(sandbox.name)
        proxy.requests.clear()
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError, match="broke") as lost:
            await broken.run("echo run >> once")
        assert lost.value.sent
        assert isinstance(lost.value, ConnectionError)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            await broken.exec("echo exec >> once")
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            await broken.code.run("print('code', file=open('once', 'a'))", on_stdout=print)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            await broken.commands.start("echo start >> once")
        assert [request.rsplit("/", 1)[1] for request in proxy.requests] == ["execs", "code", "code", "execs"]
    # What the context has run before this has ended.
    await sandbox.exec("1")
    for process in await sandbox.commands.list():
        await sandbox.commands.connect(process.id).wait()
    assert sorted((await sandbox.files.read("once")).split()) == ["code", "exec", "run", "start"]


async def test_write_is_never_repeated(sandbox: AsyncSandbox, proxy: Proxy) -> None:
    async with AsyncAgentRun(proxy.url) as breaking:
        broken = await breaking.get(sandbox.name)
        proxy.breaks = 1
        with pytest.raises(ConnectionLostError):
            await broken.files.write("log", "line\n", append=True)
    assert await sandbox.files.read("log") == "line\n"


async def test_read_is_repeated(sandbox: AsyncSandbox, proxy: Proxy) -> None:
    await sandbox.files.write("to-read", "contents")
    async with AsyncAgentRun(proxy.url) as breaking:
        proxy.breaks = 1
        broken = await breaking.get(sandbox.name)
        proxy.breaks = 1
        assert await broken.files.read("to-read") == "contents"


async def test_nobody_answers(proxy: Proxy) -> None:
    proxy.close()
    async with AsyncAgentRun(proxy.url, retry_for=0.1) as client:
        with pytest.raises(ConnectionLostError, match="cannot be reached") as lost:
            await client.create("python-agent-pool")
        assert not lost.value.sent


async def test_stream_goes_on_over_new_connections(sandbox: AsyncSandbox, proxy: Proxy) -> None:
    async with AsyncAgentRun(proxy.url) as breaking:
        broken = await breaking.get(sandbox.name)
        proxy.requests.clear()
        proxy.breaks, proxy.after = 3, 40_000
        result = await broken.commands.stream("seq 1 30000").wait()
        assert result.stdout.split() == [str(n) for n in range(1, 30001)]
        assert not result.truncated
        assert [request.split()[0] for request in proxy.requests] == ["POST", "GET", "GET", "GET"]

        proxy.requests.clear()
        proxy.breaks, proxy.after = 2, 50_000
        execution = broken.code.stream(
            "for n in range(20000): print(n)\nfor n in range(300): display(n)\n'end'"
        )
        values = [
            event.value.text async for event in execution if not isinstance(event, Output) and event.value
        ]
        assert values == [*(str(n) for n in range(300)), "'end'"]
        result_of_code = await execution.wait()
        assert result_of_code.stdout.split() == [str(n) for n in range(20000)]
        assert not result_of_code.truncated
        assert [request.split()[0] for request in proxy.requests] == ["POST", "GET", "GET"]


async def test_what_nobody_read_is_told(sandbox: AsyncSandbox) -> None:
    process = await sandbox.commands.start("seq 1 100000")
    # Its end comes after all of its output, of which the sandbox keeps 256 KiB.
    await sandbox.run(f"while [ -e /proc/{process.pid} ]; do sleep 0.01; done")
    result = await process.wait()
    assert result.truncated
    assert result.stdout.endswith("99999\n100000\n")


async def test_daemon_restarts(daemon: Daemon, client: AsyncAgentRun, sandbox: AsyncSandbox) -> None:
    process = sandbox.commands.stream(
        "echo begun; until [ -e mark ]; do sleep 0.02; done; echo goes on; exit 6"
    )
    code = await sandbox.code.start(WAITS)
    output = aiter(process)
    assert (await anext(output)).text == "begun\n"
    async with sandbox.files.watch() as changes:
        daemon.kill()
        daemon.up()
        # Only after the watch is back is there something to be seen.
        assert (await anext(aiter(changes))).type == "overflow"
        await sandbox.files.write("mark", "")
        async for change in changes:
            if change.path == "/workspace/mark":
                break
    result = await process.wait()
    assert (result.exit_code, result.stdout) == (6, "begun\ngoes on\n")
    ended = await code.wait()
    assert (ended.text, ended.stdout) == ("'end'", "begun\n")
    assert (await client.get(sandbox.name)).id == sandbox.id
