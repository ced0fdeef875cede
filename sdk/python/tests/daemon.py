"""A real daemon on a state folder of its own, for the tests."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import httpx

PROGRAM = os.environ.get("AGENTRUN_TEST_PROGRAM", "")
IMAGES = os.environ.get("AGENTRUN_TEST_IMAGES", "")

POOL = """\
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata:
  name: python-agent
spec:
  image: python:3.12-slim
  resources:
    cpu: "1"
    memory: 256Mi
  warmup:
    code: import numpy
  networkPolicy:
    egress: deny
    allow: ["192.0.2.0/24", "*.example.org:443"]
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata:
  name: python-agent-pool
spec:
  templateRef:
    name: python-agent
  replicas: 2
  snapshotAfter: Ready
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata:
  name: shell-only
spec:
  image: python:3.12-slim
  init:
    - rm -f /usr/bin/python3* /usr/local/bin/python* /usr/bin/python
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata:
  name: shell-only-pool
spec:
  templateRef:
    name: shell-only
  replicas: 1
"""


class Daemon:
    """`agentrun up`, which can be ended and started again as a user does it."""

    def __init__(self) -> None:
        if not PROGRAM or not IMAGES:
            raise RuntimeError(
                "AGENTRUN_TEST_PROGRAM and AGENTRUN_TEST_IMAGES are not set: run scripts/sdk-python.sh"
            )
        # A socket's path is short.
        self.state = Path(tempfile.mkdtemp(prefix="agentrun-sdk-"))
        (self.state / "images").symlink_to(IMAGES)
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.state / "forkd" / "socket"

    @functools.cached_property
    def api_key(self) -> str:
        """A key for its TCP address."""
        return self.command("key", "create", "tests").strip()

    @property
    def ca_file(self) -> str:
        """What its TCP address is known by."""
        return str(self.state / "forkd" / "tls" / "ca.pem")

    def command(self, *args: str, stdin: str = "") -> str:
        """Runs agentrun to its end."""
        env = {**os.environ, "AGENTRUN_STATE": str(self.state)}
        done = subprocess.run(
            [PROGRAM, *args], input=stdin.encode(), env=env, capture_output=True, timeout=300
        )
        if done.returncode != 0:
            raise RuntimeError(f"agentrun {' '.join(args)}: {done.stderr.decode()}\n{self.log}")
        return done.stdout.decode()

    def up(self) -> None:
        """Starts it, and returns when it answers."""
        with (self.state / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "up", "--engine", "gvisor", "--listen", self.address or "127.0.0.1:0"],
                env={**os.environ, "AGENTRUN_STATE": str(self.state)},
                stderr=log,
            )
        while self._process.poll() is None:
            try:
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket))) as http:
                    self.address = http.get("http://localhost/v1/version").json()["endpoint"]
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise RuntimeError(f"the daemon has ended:\n{self.log}")

    @property
    def log(self) -> str:
        return (self.state / "log").read_text()

    def down(self) -> None:
        self.command("down")
        self._wait()

    def kill(self) -> None:
        """Ends it without a word."""
        if self._process is not None:
            self._process.kill()
        self._wait()

    def _wait(self) -> None:
        if self._process is not None:
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        """Ends it and all of its sandboxes."""
        if self._process is None:
            self.up()
        for pool in ("python-agent-pool", "shell-only-pool"):
            self.command("delete", "pool", pool)
        names = [line.split()[0] for line in self.command("get", "claims").splitlines()[1:]]
        if names:
            self.command("delete", "claim", *names)
        self.down()
        # What the daemon had loaded from its folder is in memory, named by the folder.
        name = hashlib.sha256(str(self.state / "forkd").encode()).hexdigest()[:8]
        shutil.rmtree(f"/dev/shm/agentrun-{os.geteuid()}-{name}")
        shutil.rmtree(self.state)
