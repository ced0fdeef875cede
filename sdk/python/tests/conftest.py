"""One daemon for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .daemon import POOL, Daemon
from .proxy import Proxy


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the person who runs the tests is found."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("XDG_", "AGENTRUN_")) and not name.startswith(
                ("AGENTRUN_TEST_", "AGENTRUN_ASSETS")
            ):
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def daemon(_clean_environment: None) -> Iterator[Daemon]:
    """A daemon with a pool that has answered, which a bare client finds."""
    daemon = Daemon()
    daemon.up()
    try:
        (daemon.state / "pool.yaml").write_text(POOL)
        daemon.command("apply", "-f", str(daemon.state / "pool.yaml"))
        for template in ("python-agent", "shell-only"):
            daemon.command("logs", "-f", f"template/{template}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENTRUN_STATE", str(daemon.state))
            yield daemon
    finally:
        daemon.close()


@pytest.fixture
def proxy(daemon: Daemon, tmp_path: Path) -> Iterator[Proxy]:
    """A way to the daemon that can break."""
    proxy = Proxy(tmp_path / "proxy", daemon.socket)
    yield proxy
    proxy.close()
