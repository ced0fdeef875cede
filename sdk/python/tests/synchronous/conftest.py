"""What the tests of the sync SDK use; the tests are made of the async ones by generate.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_run import AgentRun, Sandbox

from ..daemon import Daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[AgentRun]:  # noqa: ARG001
    with AgentRun() as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(client: AgentRun) -> Iterator[Sandbox]:
    with client.create("python-agent-pool") as sandbox:
        yield sandbox
