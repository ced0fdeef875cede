"""What the tests of the async SDK use; `synchronous/conftest.py` has the same of the sync one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from agent_run import AsyncAgentRun, AsyncSandbox

from ..daemon import Daemon


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(daemon: Daemon) -> AsyncIterator[AsyncAgentRun]:  # noqa: ARG001
    async with AsyncAgentRun() as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sandbox(client: AsyncAgentRun) -> AsyncIterator[AsyncSandbox]:
    async with await client.create("python-agent-pool") as sandbox:
        yield sandbox
