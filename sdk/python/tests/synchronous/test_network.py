# Made by generate.py of tests/asynchronous/test_network.py: change that one.
"""Network policies and the log."""

from __future__ import annotations

import pytest

from agent_run import AgentRun, NetworkPolicy, errors

# 192.0.2.0/24 and 198.51.100.0/24 are for documentation: nobody is there.
BOUND = NetworkPolicy(allow=("192.0.2.0/24", "*.example.org:443"))
REFUSED = "import socket; socket.socket().connect_ex(('198.51.100.1', 80))"


def test_policy(client: AgentRun) -> None:
    claimed = NetworkPolicy(allow=("a.example.org:443",), deny=("evil.example.org",))
    with client.create("python-agent-pool", network_policy=claimed) as sandbox:
        policies = sandbox.network.get()
        assert policies.own == claimed
        assert policies.bounds == (BOUND,)
        assert (sandbox.info()).network == policies

        changed = NetworkPolicy("allow", deny=("evil.example.org",))
        assert (sandbox.network.set(changed)).own == changed
        with pytest.raises(errors.InvalidError, match="allow"):
            sandbox.network.set(NetworkPolicy(allow=("*",)))

        narrowed = NetworkPolicy(allow=("192.0.2.1",))
        (fork,) = sandbox.fork(network_policy=narrowed)
        inherited = fork.network.get()
        assert inherited.own == narrowed
        assert inherited.bounds == (BOUND, changed)
        fork.terminate()

        assert (sandbox.network.clear()).own is None


def test_policy_of_nobody(client: AgentRun) -> None:
    sandbox = client.create("python-agent-pool")
    sandbox.terminate()
    with pytest.raises(errors.SandboxEndedError):
        sandbox.network.set(NetworkPolicy())
    with pytest.raises(errors.SandboxEndedError):
        [entry.seq for entry in sandbox.network.log(follow=True)]


def test_log(client: AgentRun) -> None:
    with client.create("python-agent-pool") as sandbox:
        assert [entry.seq for entry in sandbox.network.log()] == []
        assert (sandbox.exec(REFUSED)).text == "111"  # ECONNREFUSED
        entry = next(iter(sandbox.network.log(refused=True)))
        assert (entry.outcome, entry.protocol, entry.address) == ("refused", "tcp", "198.51.100.1:80")
        assert entry.seq == 1
        assert (entry.kind, entry.rule) == ("closed", "closed: reserved")
        assert entry.reason
        assert [each.seq for each in sandbox.network.log(start=2)] == []
        assert sandbox.network.connections() == []


def test_follow(client: AgentRun) -> None:
    sandbox = client.create("python-agent-pool")
    sandbox.exec(REFUSED)
    seen = []
    for entry in sandbox.network.log(follow=True):
        seen.append(entry.address)
        sandbox.terminate()  # which ends it
    assert seen == ["198.51.100.1:80"]
