"""Sandboxes: claims, forks, states, ends."""

from __future__ import annotations

from contextlib import aclosing
from datetime import timedelta

import pytest

from agent_run import AsyncAgentRun, AsyncSandbox, errors

WAITS = """
import os, time
print("begun", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("done")
"""


async def test_claim(client: AsyncAgentRun) -> None:
    async with await client.create(
        "python-agent-pool",
        name="claimed",
        env={"GREETING": "hello"},
        metadata={"task": "7"},
        timeout=3600,
        idle_timeout=timedelta(minutes=30),
        on_timeout="hibernate",
    ) as sandbox:
        info = await sandbox.info()
        assert (info.name, info.id, info.state, info.pool) == (
            "claimed",
            sandbox.id,
            "Running",
            "python-agent-pool",
        )
        assert (info.timeout, info.idle_timeout, info.on_timeout) == (3600, 1800, "hibernate")
        assert (info.metadata, info.workdir, info.ended) == ({"task": "7"}, "/workspace", None)
        assert info.created.tzinfo is not None
        assert (await sandbox.exec("echo $GREETING")).stdout == "hello\n"
        assert (await sandbox.exec("import os; os.environ['GREETING']")).text == "'hello'"
        assert (await sandbox.extend("2h")).timeout == pytest.approx(7200, abs=600)
        assert (await (await client.get("claimed")).exec("6*7")).text == "42"
        assert "claimed" in {info.name for info in await client.list()}
        with pytest.raises(errors.AlreadyExistsError, match="claimed"):
            await client.create("python-agent-pool", name="claimed")
    with pytest.raises(errors.SandboxEndedError, match="killed") as ended:
        await sandbox.exec("1")
    assert (ended.value.code, ended.value.status) == ("ended", 410)
    with pytest.raises(errors.SandboxEndedError):
        await client.get("claimed")
    assert "claimed" not in {info.name for info in await client.list()}
    last = next(info for info in await client.list(ended=True) if info.id == sandbox.id)
    assert (last.state, last.reason) == ("Ended", "killed")
    assert last.ended is not None
    await sandbox.kill()  # again


async def test_forks_inherit_and_part(client: AsyncAgentRun) -> None:
    async with await client.create("python-agent-pool") as source:
        await source.exec("x = 10")
        await source.files.write("shared.txt", "from the source")
        first, second, third = forks = await source.fork(3, name=f"{source.name}-try")
        assert [fork.name for fork in forks] == [f"{source.name}-try-{n}" for n in (1, 2, 3)]
        for step, fork in enumerate(forks, 1):
            assert await fork.files.read("shared.txt") == "from the source"
            await fork.exec(f"x += {step}; open('own.txt', 'w').write('{step}')")
        assert [(await fork.exec("x")).text for fork in forks] == ["11", "12", "13"]
        assert [await fork.files.read("own.txt") for fork in forks] == ["1", "2", "3"]
        assert (await source.exec("x")).text == "10"
        assert not await source.files.exists("own.txt")
        assert len({(await fork.exec("import random; random.random()")).text for fork in forks}) == 3
        info = await first.info()
        assert (info.parent, info.fork) == (source.id, f"{source.name}-try")
        (grandchild,) = await first.fork()
        assert (await grandchild.exec("x")).text == "11"
        for fork in (first, second, third, grandchild):
            await fork.terminate()


async def test_execution_goes_on_in_a_fork(client: AsyncAgentRun) -> None:
    async with await client.create("python-agent-pool") as source:
        execution = await source.code.start(WAITS, id="long")
        await anext(piece async for piece in execution if hasattr(piece, "stream"))
        (fork,) = await source.fork()
        await fork.files.write("go", "")
        result = await fork.code.connect("long").wait()
        assert (result.stdout, result.status) == ("begun\ndone\n", "ok")
        assert (await source.code.contexts())[0].running == "long"
        await fork.terminate()
        await execution.interrupt()
        assert (await execution.wait()).status == "interrupted"


async def test_states(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("kept = 5")
    assert (await sandbox.pause()).state == "Paused"
    assert (await sandbox.info()).state == "Paused"
    assert (await sandbox.resume()).state == "Running"
    assert (await sandbox.hibernate()).state == "Hibernated"
    assert (await sandbox.exec("kept")).text == "5"
    assert (await sandbox.info()).state == "Running"


async def test_errors(client: AsyncAgentRun) -> None:
    with pytest.raises(errors.NotFoundError, match="no-such-pool") as missing:
        await client.create("no-such-pool")
    assert missing.value.remediation
    with pytest.raises(errors.InvalidError):
        await client.create("Not A Pool")
    with pytest.raises(errors.InvalidError, match="timeout"):
        await client.create("python-agent-pool", timeout="soon")
    with pytest.raises(ValueError, match="not a duration"):
        await client.create("python-agent-pool", timeout=-1)
    with pytest.raises(errors.NotFoundError, match="nobody"):
        await client.get("nobody")
    with pytest.raises(ValueError, match="not the name or id"):
        await client.get("a/../b")
    with pytest.raises(errors.InvalidError, match="replicas"):
        await (await client.create("python-agent-pool", name="short-lived")).fork(0)
    await (await client.get("short-lived")).terminate()


async def test_context_ends_on_an_exception(client: AsyncAgentRun) -> None:
    names: list[str] = []

    async def fail() -> None:
        async with await client.create("python-agent-pool") as sandbox:
            names.append(sandbox.name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with pytest.raises(errors.SandboxEndedError):
        await client.get(names[0])


async def test_bare_sandbox(client: AsyncAgentRun) -> None:
    async with await AsyncSandbox.create("python-agent-pool", metadata={"bare": "yes"}) as sandbox:
        (fork,) = await sandbox.fork()
    # The fork uses the connections of the sandbox that made it, which has ended.
    assert (await fork.exec("1 + 1")).text == "2"
    await fork.terminate()
    with pytest.raises(errors.SandboxEndedError):
        await fork.info()
    await fork.client.close()
    async with await AsyncSandbox.create("python-agent-pool", client=client) as sandbox:
        assert sandbox.client is client
        assert sandbox.name in repr(sandbox)
    with pytest.raises(errors.NotFoundError):
        await AsyncSandbox.create("no-such-pool")


async def test_version(client: AsyncAgentRun) -> None:
    assert (await client.version()).api == "v1"


async def test_watch(client: AsyncAgentRun) -> None:
    async with aclosing(client.watch()) as events:
        known = set()
        async for event in events:
            if event.type == "synced":
                break
            assert event.type == "object"
            assert event.sandbox is not None
            known.add(event.sandbox.id)
        sandbox = await client.create("python-agent-pool")
        assert sandbox.id not in known
        told = []
        async for event in events:
            if event.sandbox is None or event.sandbox.id != sandbox.id:
                continue
            told.append((event.type, event.sandbox.state))
            if event.type == "deleted":
                break
            await sandbox.terminate()
    assert told == [("object", "Running"), ("deleted", "Ended")]
