"""Sandboxes for AI agents that fork.

from agent_run import Sandbox

with Sandbox.create("python-agent-pool") as sandbox:
    print(sandbox.exec("print('hello')").stdout)
"""

from . import errors
from ._async.code import AsyncCode, AsyncExecution
from ._async.commands import AsyncCommands, AsyncProcess, AsyncTerminal
from ._async.files import AsyncFiles, AsyncWatch
from ._async.network import AsyncNetwork
from ._async.sandbox import AsyncAgentRun, AsyncSandbox
from ._sync.code import Code, Execution
from ._sync.commands import Commands, Process, Terminal
from ._sync.files import Files, Watch
from ._sync.network import Network
from ._sync.sandbox import AgentRun, Sandbox
from ._version import __version__
from .errors import (
    AgentRunError,
    ApiError,
    ConfigError,
    ConnectionLostError,
    FailedError,
    ForkIncompleteError,
    NoServerError,
    ProtocolError,
)
from .models import (
    Checkpoint,
    CodeContext,
    CodeError,
    CodeEvent,
    CodeResult,
    CommandResult,
    FileInfo,
    Inject,
    Mime,
    NetworkEntry,
    NetworkPolicies,
    NetworkPolicy,
    Output,
    ProcessInfo,
    SandboxEvent,
    SandboxInfo,
    SecretRef,
    Version,
    WatchEvent,
)

__all__ = [
    "AgentRun",
    "AgentRunError",
    "ApiError",
    "AsyncAgentRun",
    "AsyncCode",
    "AsyncCommands",
    "AsyncExecution",
    "AsyncFiles",
    "AsyncNetwork",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncTerminal",
    "AsyncWatch",
    "Checkpoint",
    "Code",
    "CodeContext",
    "CodeError",
    "CodeEvent",
    "CodeResult",
    "CommandResult",
    "Commands",
    "ConfigError",
    "ConnectionLostError",
    "Execution",
    "FailedError",
    "FileInfo",
    "Files",
    "ForkIncompleteError",
    "Inject",
    "Mime",
    "Network",
    "NetworkEntry",
    "NetworkPolicies",
    "NetworkPolicy",
    "NoServerError",
    "Output",
    "Process",
    "ProcessInfo",
    "ProtocolError",
    "Sandbox",
    "SandboxEvent",
    "SandboxInfo",
    "SecretRef",
    "Terminal",
    "Version",
    "Watch",
    "WatchEvent",
    "__version__",
    "errors",
]
