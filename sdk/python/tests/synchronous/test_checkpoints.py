# Made by generate.py of tests/asynchronous/test_checkpoints.py: change that one.
"""Checkpoints: made, listed, restored more than once, deleted."""

from __future__ import annotations

import pytest

from agent_run import AgentRun, Sandbox, errors

from ..proxy import Proxy


def test_checkpoint_and_restore(client: AgentRun, sandbox: Sandbox) -> None:
    sandbox.exec("x = 1; open('f', 'w').write('one')")
    made = sandbox.checkpoint()
    assert (made.source, made.source_id, made.pool) == (sandbox.name, sandbox.id, "python-agent-pool")
    assert made.size > 0
    sandbox.exec("x = 2; open('f', 'w').write('two')")
    first = client.restore(made, metadata={"try": "1"}, timeout="1h")
    second = client.restore(made.name)
    for again in (first, second):
        assert (again.exec("x")).text == "1"
        assert again.files.read("f") == "one"
        again.exec("x = 3")
    info = first.info()
    assert (info.checkpoint, info.parent, info.metadata) == (made.name, sandbox.id, {"try": "1"})
    assert (sandbox.exec("x")).text == "2"
    assert made.id in {each.id for each in client.checkpoints()}
    client.delete_checkpoint(made)
    assert made.id not in {each.id for each in client.checkpoints()}
    assert (first.exec("x")).text == "3"
    with pytest.raises(errors.NotFoundError):
        client.restore(made)
    for again in (first, second):
        again.terminate()


def test_made_once(client: AgentRun, sandbox: Sandbox, proxy: Proxy) -> None:
    with AgentRun(proxy.url) as breaking:
        broken = breaking.get(sandbox.name)
        proxy.breaks = 1
        made = broken.checkpoint()
        assert [each.id for each in client.checkpoints() if each.source_id == sandbox.id] == [made.id]
        proxy.breaks = 1
        restored = breaking.restore(made)
        assert [each.id for each in client.list() if each.checkpoint == made.name] == [restored.id]
        restored.terminate()
    client.delete_checkpoint(made)
