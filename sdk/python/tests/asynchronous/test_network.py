"""Network policies and the log."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, NetworkPolicy, errors

# 192.0.2.0/24 and 198.51.100.0/24 are for documentation: nobody is there.
BOUND = NetworkPolicy(allow=("192.0.2.0/24", "*.example.org:443"))
REFUSED = "import socket; socket.socket().connect_ex(('198.51.100.1', 80))"


async def test_policy(client: AsyncAgentRun) -> None:
    claimed = NetworkPolicy(allow=("a.example.org:443",), deny=("evil.example.org",))
    async with await client.create("python-agent-pool", network_policy=claimed) as sandbox:
        policies = await sandbox.network.get()
        assert policies.own == claimed
        assert policies.bounds == (BOUND,)
        assert (await sandbox.info()).network == policies

        changed = NetworkPolicy("allow", deny=("evil.example.org",))
        assert (await sandbox.network.set(changed)).own == changed
        with pytest.raises(errors.InvalidError, match="allow"):
            await sandbox.network.set(NetworkPolicy(allow=("*",)))

        narrowed = NetworkPolicy(allow=("192.0.2.1",))
        (fork,) = await sandbox.fork(network_policy=narrowed)
        inherited = await fork.network.get()
        assert inherited.own == narrowed
        assert inherited.bounds == (BOUND, changed)
        await fork.terminate()

        assert (await sandbox.network.clear()).own is None


async def test_policy_of_nobody(client: AsyncAgentRun) -> None:
    sandbox = await client.create("python-agent-pool")
    await sandbox.terminate()
    with pytest.raises(errors.SandboxEndedError):
        await sandbox.network.set(NetworkPolicy())
    with pytest.raises(errors.SandboxEndedError):
        [entry.seq async for entry in sandbox.network.log(follow=True)]


async def test_log(client: AsyncAgentRun) -> None:
    async with await client.create("python-agent-pool") as sandbox:
        assert [entry.seq async for entry in sandbox.network.log()] == []
        assert (await sandbox.exec(REFUSED)).text == "111"  # ECONNREFUSED
        entry = await anext(aiter(sandbox.network.log(refused=True)))
        assert (entry.outcome, entry.protocol, entry.address) == ("refused", "tcp", "198.51.100.1:80")
        assert entry.seq == 1
        assert (entry.kind, entry.rule) == ("closed", "closed: reserved")
        assert entry.reason
        assert [each.seq async for each in sandbox.network.log(start=2)] == []
        assert await sandbox.network.connections() == []


async def test_follow(client: AsyncAgentRun) -> None:
    sandbox = await client.create("python-agent-pool")
    await sandbox.exec(REFUSED)
    seen = []
    async for entry in sandbox.network.log(follow=True):
        seen.append(entry.address)
        await sandbox.terminate()  # which ends it
    assert seen == ["198.51.100.1:80"]
