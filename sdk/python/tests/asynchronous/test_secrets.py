"""Secrets of a claim."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, SecretRef, errors

from ..daemon import Daemon


async def test_secrets(daemon: Daemon, client: AsyncAgentRun) -> None:
    daemon.command("secret", "set", "llm", "KEY=-", stdin="hidden-value")
    refs = [SecretRef("llm", "KEY"), SecretRef("llm", "KEY", env="OTHER")]
    async with await client.create("python-agent-pool", secrets=refs) as sandbox:
        assert (await sandbox.exec("echo $KEY $OTHER")).stdout == "hidden-value hidden-value\n"
        assert (await sandbox.exec("import os; os.environ['KEY']")).text == "'hidden-value'"
        info = await sandbox.info()
        assert [ref.name for ref in info.secrets] == ["llm", "llm"]
        assert info.secrets_by
        assert "hidden-value" not in repr(info)
        (fork,) = await sandbox.fork()
        assert (await fork.exec("echo $KEY")).stdout == "hidden-value\n"
        await fork.terminate()
    with pytest.raises(errors.NotFoundError, match="nothing"):
        await client.create("python-agent-pool", secrets=[SecretRef("nothing", "KEY")])
