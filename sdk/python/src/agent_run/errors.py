"""What goes wrong, as types.

`ApiError` is what a daemon answers; it has one subclass for each `code` of the API.
Everything else that the SDK raises is another `AgentRunError`.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import CodeResult, CommandResult


class AgentRunError(Exception):
    """Whatever the SDK raises by itself."""


class ConfigError(AgentRunError):
    """A setting, an environment variable or the configuration file is wrong."""


class NoServerError(ConfigError):
    """There is no server: none was named, and no daemon runs here."""


class ProtocolError(AgentRunError):
    """The server answered something that is not of this API."""


class ConnectionLostError(AgentRunError, builtins.ConnectionError):
    """The server could not be reached, or the connection broke.

    `sent` tells whether the request may have reached the server: what it asked for may
    have been done then. It is never sent twice for you if it runs something.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class FailedError(AgentRunError):
    """A command or code failed, and `check()` was asked to say so."""

    def __init__(self, message: str, result: CommandResult | CodeResult) -> None:
        super().__init__(message)
        self.result = result


class ForkIncompleteError(AgentRunError):
    """Some children of a fork could not be made.

    `sandboxes` are those that were, and `problems` says why the others, by name, were not.
    """

    def __init__(self, name: str, sandboxes: Sequence[Any], problems: Mapping[str, str]) -> None:
        total = len(sandboxes) + len(problems)
        why = "; ".join(f"{child}: {problem}" for child, problem in problems.items())
        super().__init__(f"fork {name} has {len(sandboxes)} of {total} children ({why})")
        self.name = name
        self.sandboxes = list(sandboxes)
        self.problems = dict(problems)


class ApiError(AgentRunError):
    """What the daemon answers if something did not work."""

    code: str = ""

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        cause: str = "",
        remediation: str = "",
        status: int = 0,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.message = message
        self.cause = cause
        self.remediation = remediation
        self.status = status
        self.request_id = request_id

    def __str__(self) -> str:
        text = self.message
        if self.cause:
            text += f": {self.cause}"
        if self.remediation:
            text += f". {self.remediation}"
        return text


class InvalidError(ApiError, ValueError):
    """The request is wrong; the message names the field."""

    code = "invalid"


class UnauthenticatedError(ApiError):
    """The API key is missing or not valid."""

    code = "unauthenticated"


class PermissionDeniedError(ApiError):
    """The key may not do this."""

    code = "permission_denied"


class NotFoundError(ApiError, LookupError):
    """There is no such pool, sandbox, process or execution."""

    code = "not_found"


class MethodNotAllowedError(ApiError):
    """The route exists, but not with this method: the daemon is of another version."""

    code = "method_not_allowed"


class NotAcceptableError(ApiError):
    """The daemon cannot answer in this form."""

    code = "not_acceptable"


class AlreadyExistsError(ApiError):
    """The name or id is taken."""

    code = "already_exists"


class ConflictError(ApiError):
    """The state of the thing does not allow this now."""

    code = "conflict"


class SandboxEndedError(ApiError):
    """The sandbox has ended; the message says of what."""

    code = "ended"


class TooLargeError(ApiError):
    """The request has more bytes than is allowed."""

    code = "too_large"


class UnsupportedMediaTypeError(ApiError):
    """The daemon does not take a body of this type."""

    code = "unsupported_media_type"


class CannotRunError(ApiError):
    """The program is missing in the sandbox, or cannot be executed."""

    code = "cannot_run"


class SandboxFileNotFoundError(ApiError, builtins.FileNotFoundError):
    """There is no such file in the sandbox."""

    code = "file_not_found"


class SandboxFileExistsError(ApiError, builtins.FileExistsError):
    """The file is there already."""

    code = "file_exists"


class SandboxFileDeniedError(ApiError, builtins.PermissionError):
    """The sandbox's user may not do this with the file."""

    code = "file_denied"


class InsufficientCapacityError(ApiError):
    """The node has no memory left for another sandbox."""

    code = "insufficient_capacity"


class ResourceExhaustedError(ApiError):
    """A limit inside of the sandbox is reached, such as its disk."""

    code = "resource_exhausted"


class NotReadyError(ApiError):
    """The pool has nothing to claim yet; its template may still be built."""

    code = "not_ready"


class RequestTimeoutError(ApiError, builtins.TimeoutError):
    """It took too long."""

    code = "timeout"


class UnavailableError(ApiError):
    """The daemon cannot reach the sandbox now."""

    code = "unavailable"


class PortClosedError(ApiError):
    """No program in the sandbox listens on that port."""

    code = "port_closed"


class UnimplementedError(ApiError):
    """The engine of this node cannot do this."""

    code = "unimplemented"


class ShuttingDownError(ApiError):
    """The daemon is about to end; sandboxes run on."""

    code = "shutting_down"


class TooOldError(ApiError):
    """The daemon does not keep what has changed since then: look at everything again."""

    code = "too_old"


class OtherStateError(ApiError):
    """The daemon has another state folder than it had: what was known of it is of no use."""

    code = "other_state"


class CordonedError(ApiError):
    """The node makes no sandboxes, or wakes none, until somebody ends that."""

    code = "cordoned"


class AuditFailedError(ApiError):
    """The daemon cannot write its audit log, and does nothing that would be missing there."""

    code = "audit_failed"


class InternalError(ApiError):
    """A defect of the daemon; `request_id` is in its log."""

    code = "internal"


BY_CODE: Mapping[str, type[ApiError]] = {
    kind.code: kind
    for kind in (
        InvalidError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotFoundError,
        MethodNotAllowedError,
        NotAcceptableError,
        AlreadyExistsError,
        ConflictError,
        SandboxEndedError,
        TooLargeError,
        UnsupportedMediaTypeError,
        CannotRunError,
        SandboxFileNotFoundError,
        SandboxFileExistsError,
        SandboxFileDeniedError,
        InsufficientCapacityError,
        ResourceExhaustedError,
        NotReadyError,
        RequestTimeoutError,
        UnavailableError,
        UnimplementedError,
        ShuttingDownError,
        TooOldError,
        OtherStateError,
        CordonedError,
        AuditFailedError,
        PortClosedError,
        InternalError,
    )
}


def from_wire(body: object, *, status: int = 0, request_id: str = "") -> AgentRunError:
    """The error that a daemon describes. One with a code of a newer daemon is an `ApiError`."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return ProtocolError(
            f"the server answered with status {status}, and nothing that is understood. "
            "Check that the address is that of an AgentRun daemon"
        )
    kind = BY_CODE.get(body["code"], ApiError)
    return kind(
        str(body.get("message", "")),
        code=body["code"],
        cause=str(body.get("cause", "")),
        remediation=str(body.get("remediation", "")),
        status=status,
        request_id=request_id,
    )
