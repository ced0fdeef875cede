"""Secrets of a claim."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, Inject, SecretRef, errors

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


TRUSTING = """\
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: trusting}
spec:
  image: python:3.12-slim
  trustNamespaceCA: true
  networkPolicy: {allow: ["api.example.org:443"]}
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata: {name: trusting}
spec: {templateRef: {name: trusting}, replicas: 1}
"""


async def test_inject(daemon: Daemon, client: AsyncAgentRun) -> None:
    daemon.command("secret", "set", "llm", "KEY=-", stdin="hidden-value")
    ref = SecretRef("llm", "KEY", inject=Inject("api.example.org", "Authorization", "Bearer {}"))
    with pytest.raises(errors.ConflictError, match="trusts no CA"):
        await client.create("python-agent-pool", secrets=[ref])
    daemon.command("apply", "-f", "-", stdin=TRUSTING)
    daemon.command("logs", "-f", "template/trusting")
    async with await client.create("trusting", secrets=[ref]) as sandbox:
        assert (await sandbox.exec("echo $KEY")).stdout == "agentrun-injected.llm.KEY\n"
        own = (await sandbox.exec("cat $NODE_EXTRA_CA_CERTS")).stdout
        assert own.count("BEGIN CERTIFICATE") == 1
        assert (await sandbox.exec("cat $SSL_CERT_FILE")).stdout.endswith(own)
        assert (await sandbox.info()).secrets == (ref,)
    elsewhere = SecretRef("llm", "KEY", inject=Inject("evil.example.org", "X-Key"))
    with pytest.raises(errors.ConflictError, match="does not allow"):
        await client.create("trusting", secrets=[elsewhere])
