# Made by generate.py of tests/asynchronous/test_sandbox.py: change that one.
"""Sandboxes: claims, forks, states, ends."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

from agent_run import AgentRun, Sandbox, errors

WAITS = """
import os, time
print("begun", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("done")
"""


def test_claim(client: AgentRun) -> None:
    with client.create(
        "python-agent-pool",
        name="claimed",
        env={"GREETING": "hello"},
        metadata={"task": "7"},
        timeout=3600,
        idle_timeout=timedelta(minutes=30),
        on_timeout="hibernate",
    ) as sandbox:
        info = sandbox.info()
        assert (info.name, info.id, info.state, info.pool) == (
            "claimed",
            sandbox.id,
            "Running",
            "python-agent-pool",
        )
        assert (info.timeout, info.idle_timeout, info.on_timeout) == (3600, 1800, "hibernate")
        assert (info.metadata, info.workdir, info.ended) == ({"task": "7"}, "/workspace", None)
        assert info.created.tzinfo is not None
        assert (sandbox.exec("echo $GREETING")).stdout == "hello\n"
        assert (sandbox.exec("import os; os.environ['GREETING']")).text == "'hello'"
        assert (sandbox.extend("2h")).timeout == pytest.approx(7200, abs=600)
        assert ((client.get("claimed")).exec("6*7")).text == "42"
        assert "claimed" in {info.name for info in client.list()}
        with pytest.raises(errors.AlreadyExistsError, match="claimed"):
            client.create("python-agent-pool", name="claimed")
    with pytest.raises(errors.SandboxEndedError, match="killed") as ended:
        sandbox.exec("1")
    assert (ended.value.code, ended.value.status) == ("ended", 410)
    with pytest.raises(errors.SandboxEndedError):
        client.get("claimed")
    assert "claimed" not in {info.name for info in client.list()}
    last = next(info for info in client.list(ended=True) if info.id == sandbox.id)
    assert (last.state, last.reason) == ("Ended", "killed")
    assert last.ended is not None
    sandbox.kill()  # again


def test_forks_inherit_and_part(client: AgentRun) -> None:
    with client.create("python-agent-pool") as source:
        source.exec("x = 10")
        source.files.write("shared.txt", "from the source")
        first, second, third = forks = source.fork(3, name=f"{source.name}-try")
        assert [fork.name for fork in forks] == [f"{source.name}-try-{n}" for n in (1, 2, 3)]
        for step, fork in enumerate(forks, 1):
            assert fork.files.read("shared.txt") == "from the source"
            fork.exec(f"x += {step}; open('own.txt', 'w').write('{step}')")
        assert [(fork.exec("x")).text for fork in forks] == ["11", "12", "13"]
        assert [fork.files.read("own.txt") for fork in forks] == ["1", "2", "3"]
        assert (source.exec("x")).text == "10"
        assert not source.files.exists("own.txt")
        assert len({(fork.exec("import random; random.random()")).text for fork in forks}) == 3
        info = first.info()
        assert (info.parent, info.fork) == (source.id, f"{source.name}-try")
        (grandchild,) = first.fork()
        assert (grandchild.exec("x")).text == "11"
        for fork in (first, second, third, grandchild):
            fork.terminate()


def test_execution_goes_on_in_a_fork(client: AgentRun) -> None:
    with client.create("python-agent-pool") as source:
        execution = source.code.start(WAITS, id="long")
        next(piece for piece in execution if hasattr(piece, "stream"))
        (fork,) = source.fork()
        fork.files.write("go", "")
        result = fork.code.connect("long").wait()
        assert (result.stdout, result.status) == ("begun\ndone\n", "ok")
        assert (source.code.contexts())[0].running == "long"
        fork.terminate()
        execution.interrupt()
        assert (execution.wait()).status == "interrupted"


def test_states(sandbox: Sandbox) -> None:
    sandbox.exec("kept = 5")
    assert (sandbox.pause()).state == "Paused"
    assert (sandbox.info()).state == "Paused"
    assert (sandbox.resume()).state == "Running"
    assert (sandbox.hibernate()).state == "Hibernated"
    assert (sandbox.exec("kept")).text == "5"
    assert (sandbox.info()).state == "Running"


def test_errors(client: AgentRun) -> None:
    with pytest.raises(errors.NotFoundError, match="no-such-pool") as missing:
        client.create("no-such-pool")
    assert missing.value.remediation
    with pytest.raises(errors.InvalidError):
        client.create("Not A Pool")
    with pytest.raises(errors.InvalidError, match="timeout"):
        client.create("python-agent-pool", timeout="soon")
    with pytest.raises(ValueError, match="not a duration"):
        client.create("python-agent-pool", timeout=-1)
    with pytest.raises(errors.NotFoundError, match="nobody"):
        client.get("nobody")
    with pytest.raises(ValueError, match="not the name or id"):
        client.get("a/../b")
    with pytest.raises(errors.InvalidError, match="replicas"):
        (client.create("python-agent-pool", name="short-lived")).fork(0)
    (client.get("short-lived")).terminate()


def test_context_ends_on_an_exception(client: AgentRun) -> None:
    names: list[str] = []

    def fail() -> None:
        with client.create("python-agent-pool") as sandbox:
            names.append(sandbox.name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(errors.SandboxEndedError):
        client.get(names[0])


def test_bare_sandbox(client: AgentRun) -> None:
    with Sandbox.create("python-agent-pool", metadata={"bare": "yes"}) as sandbox:
        (fork,) = sandbox.fork()
    # The fork uses the connections of the sandbox that made it, which has ended.
    assert (fork.exec("1 + 1")).text == "2"
    fork.terminate()
    with pytest.raises(errors.SandboxEndedError):
        fork.info()
    fork.client.close()
    with Sandbox.create("python-agent-pool", client=client) as sandbox:
        assert sandbox.client is client
        assert sandbox.name in repr(sandbox)
    with pytest.raises(errors.NotFoundError):
        Sandbox.create("no-such-pool")


def test_version(client: AgentRun) -> None:
    assert (client.version()).api == "v1"


def test_watch(client: AgentRun) -> None:
    with closing(client.watch()) as events:
        known = set()
        for event in events:
            if event.type == "synced":
                break
            assert event.type == "object"
            assert event.sandbox is not None
            known.add(event.sandbox.id)
        sandbox = client.create("python-agent-pool")
        assert sandbox.id not in known
        told = []
        for event in events:
            if event.sandbox is None or event.sandbox.id != sandbox.id:
                continue
            told.append((event.type, event.sandbox.state))
            if event.type == "deleted":
                break
            sandbox.terminate()
    assert told == [("object", "Running"), ("deleted", "Ended")]
