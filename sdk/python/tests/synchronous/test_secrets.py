# Made by generate.py of tests/asynchronous/test_secrets.py: change that one.
"""Secrets of a claim."""

from __future__ import annotations

import pytest

from agent_run import AgentRun, SecretRef, errors

from ..daemon import Daemon


def test_secrets(daemon: Daemon, client: AgentRun) -> None:
    daemon.command("secret", "set", "llm", "KEY=-", stdin="hidden-value")
    refs = [SecretRef("llm", "KEY"), SecretRef("llm", "KEY", env="OTHER")]
    with client.create("python-agent-pool", secrets=refs) as sandbox:
        assert (sandbox.exec("echo $KEY $OTHER")).stdout == "hidden-value hidden-value\n"
        assert (sandbox.exec("import os; os.environ['KEY']")).text == "'hidden-value'"
        info = sandbox.info()
        assert [ref.name for ref in info.secrets] == ["llm", "llm"]
        assert info.secrets_by
        assert "hidden-value" not in repr(info)
        (fork,) = sandbox.fork()
        assert (fork.exec("echo $KEY")).stdout == "hidden-value\n"
        fork.terminate()
    with pytest.raises(errors.NotFoundError, match="nothing"):
        client.create("python-agent-pool", secrets=[SecretRef("nothing", "KEY")])
