"""Checkpoints: made, listed, restored more than once, deleted."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, AsyncSandbox, errors

from ..proxy import Proxy


async def test_checkpoint_and_restore(client: AsyncAgentRun, sandbox: AsyncSandbox) -> None:
    await sandbox.exec("x = 1; open('f', 'w').write('one')")
    made = await sandbox.checkpoint()
    assert (made.source, made.source_id, made.pool) == (sandbox.name, sandbox.id, "python-agent-pool")
    assert made.size > 0
    await sandbox.exec("x = 2; open('f', 'w').write('two')")
    first = await client.restore(made, metadata={"try": "1"}, timeout="1h")
    second = await client.restore(made.name)
    for again in (first, second):
        assert (await again.exec("x")).text == "1"
        assert await again.files.read("f") == "one"
        await again.exec("x = 3")
    info = await first.info()
    assert (info.checkpoint, info.parent, info.metadata) == (made.name, sandbox.id, {"try": "1"})
    assert (await sandbox.exec("x")).text == "2"
    assert made.id in {each.id for each in await client.checkpoints()}
    await client.delete_checkpoint(made)
    assert made.id not in {each.id for each in await client.checkpoints()}
    assert (await first.exec("x")).text == "3"
    with pytest.raises(errors.NotFoundError):
        await client.restore(made)
    for again in (first, second):
        await again.terminate()


async def test_made_once(client: AsyncAgentRun, sandbox: AsyncSandbox, proxy: Proxy) -> None:
    async with AsyncAgentRun(proxy.url) as breaking:
        broken = await breaking.get(sandbox.name)
        proxy.breaks = 1
        made = await broken.checkpoint()
        assert [each.id for each in await client.checkpoints() if each.source_id == sandbox.id] == [made.id]
        proxy.breaks = 1
        restored = await breaking.restore(made)
        assert [each.id for each in await client.list() if each.checkpoint == made.name] == [restored.id]
        await restored.terminate()
    await client.delete_checkpoint(made)
