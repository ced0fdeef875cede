# Made by generate.py of tests/asynchronous/test_secrets.py: change that one.
"""Secrets of a claim."""

from __future__ import annotations

import pytest

from agent_run import AgentRun, Inject, SecretRef, errors

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


def test_inject(daemon: Daemon, client: AgentRun) -> None:
    daemon.command("secret", "set", "llm", "KEY=-", stdin="hidden-value")
    ref = SecretRef("llm", "KEY", inject=Inject("api.example.org", "Authorization", "Bearer {}"))
    with pytest.raises(errors.ConflictError, match="trusts no CA"):
        client.create("python-agent-pool", secrets=[ref])
    daemon.command("apply", "-f", "-", stdin=TRUSTING)
    daemon.command("logs", "-f", "template/trusting")
    with client.create("trusting", secrets=[ref]) as sandbox:
        assert (sandbox.exec("echo $KEY")).stdout == "agentrun-injected.llm.KEY\n"
        own = (sandbox.exec("cat $NODE_EXTRA_CA_CERTS")).stdout
        assert own.count("BEGIN CERTIFICATE") == 1
        assert (sandbox.exec("cat $SSL_CERT_FILE")).stdout.endswith(own)
        assert (sandbox.info()).secrets == (ref,)
    elsewhere = SecretRef("llm", "KEY", inject=Inject("evil.example.org", "X-Key"))
    with pytest.raises(errors.ConflictError, match="does not allow"):
        client.create("trusting", secrets=[elsewhere])
