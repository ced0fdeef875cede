"""A proxy that breaks connections, between a client and the daemon."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path

_REQUEST = re.compile(rb"^(GET|POST|PUT|DELETE) (\S+) HTTP/1\.1\r$", re.MULTILINE)
_KEY = re.compile(rb"^idempotency-key: (\S+)\r$", re.MULTILINE | re.IGNORECASE)


class Proxy:
    """Forwards, and notes what was asked for."""

    def __init__(self, path: Path, target: Path) -> None:
        self.url = f"unix://{path}"
        self.requests: list[str] = []  # method and path
        self.keys: list[str] = []
        # How many answers are still to be broken off, and after how many bytes. The daemon
        # has done its work when the first byte of an answer is there.
        self.breaks = 0
        self.after = 0
        self._target = str(target)
        self._lock = threading.Lock()  # protects all of the above
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Closing alone does not wake the thread that accepts.
        _end(self._server)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            try:
                daemon.connect(self._target)
            except OSError:
                daemon.close()
                client.close()
                continue
            passed = [0]  # bytes of the answer under way
            threading.Thread(target=self._up, args=(client, daemon, passed), daemon=True).start()
            threading.Thread(target=self._down, args=(daemon, client, passed), daemon=True).start()

    def _up(self, client: socket.socket, daemon: socket.socket, passed: list[int]) -> None:
        try:
            while data := client.recv(1 << 16):
                with self._lock:
                    passed[0] = 0
                    self.requests += [f"{m[1].decode()} {m[2].decode()}" for m in _REQUEST.finditer(data)]
                    self.keys += [m[1].decode() for m in _KEY.finditer(data)]
                daemon.sendall(data)
        except OSError:
            pass
        finally:
            _end(daemon)

    def _down(self, daemon: socket.socket, client: socket.socket, passed: list[int]) -> None:
        try:
            while data := daemon.recv(1 << 16):
                with self._lock:
                    before, passed[0] = passed[0], passed[0] + len(data)
                    broken = self.breaks > 0 and passed[0] > self.after
                    if broken:
                        self.breaks -= 1
                        # All before it is passed on, however much comes at once.
                        data = data[: max(0, self.after - before)]
                client.sendall(data)
                if broken:
                    return
        except OSError:
            pass
        finally:
            _end(client)
            client.close()
            _end(daemon)
            daemon.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        sock.shutdown(socket.SHUT_RDWR)
