# Made by generate.py of src/agent_run/_async/network.py: change that one.
"""What a sandbox may connect to, and what it has connected to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import SandboxEndedError
from ..models import NetworkEntry, NetworkPolicies, NetworkPolicy
from .transport import Request, Transport

_PAGE = "1000"
_WAIT = "20s"


class Network:
    """The network of a sandbox. Nothing here wakes it."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox

    def get(self) -> NetworkPolicies:
        """Its own policy and its bounds. Each of them must allow a connection."""
        return NetworkPolicies.from_wire(self._transport.json(Request("GET", self._path())))

    def set(self, policy: NetworkPolicy) -> NetworkPolicies:
        """Replaces its own policy. Connections that are not allowed any more end at once.

        It never reaches more than its bounds allow: those of its template, and of the
        sandboxes that it was forked from.
        """
        request = Request("PUT", self._path("network", "policy"), body=policy.to_wire())
        return NetworkPolicies.from_wire(self._transport.json(request))

    def clear(self) -> NetworkPolicies:
        """Removes its own policy: its bounds alone hold then."""
        request = Request("DELETE", self._path("network", "policy"))
        return NetworkPolicies.from_wire(self._transport.json(request))

    def log(self, *, start: int = 1, follow: bool = False, refused: bool = False) -> Iterator[NetworkEntry]:
        """Its connections that have ended, and those that were refused; the oldest first.

        `start` is the number (`seq`) of the first entry. With `follow` it goes on until the
        sandbox ends. With `refused` it tells refusals only. The daemon keeps the last entries,
        in memory: a gap in the numbers says that older ones were dropped.
        """
        begun = False
        while True:
            try:
                page = self._page(start, follow=follow)
            except SandboxEndedError:
                if follow and begun:
                    return
                raise
            begun = True
            for wire in page["items"]:
                entry = NetworkEntry.from_wire(wire)
                if not refused or entry.outcome == "refused":
                    yield entry
            if not follow and not page["items"]:
                return
            start = page["next"]

    def connections(self) -> list[NetworkEntry]:
        """The connections that are open, the oldest first."""
        query = {"open": "true", "limit": "1"}
        page = self._transport.json(Request("GET", self._path("network", "log"), query))
        return [NetworkEntry.from_wire(each) for each in page.get("open", ())]

    def _page(self, start: int, *, follow: bool) -> Any:
        query = {"from": str(start), "limit": _PAGE}
        if follow:
            query["wait"] = _WAIT
        return self._transport.json(Request("GET", self._path("network", "log"), query, waits=follow))

    def _path(self, *more: str) -> str:
        return self._transport.path("sandboxes", self._sandbox, *more)
