"""Where the server is: arguments, then environment, then configuration file, then the local socket."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from .errors import ConfigError, NoServerError

ENV_SERVER = "AGENTRUN_SERVER"
ENV_API_KEY = "AGENTRUN_API_KEY"
ENV_CA_FILE = "AGENTRUN_CA_FILE"
ENV_STATE = "AGENTRUN_STATE"

_FIELDS = ("server", "apiKey", "caFile")


@dataclass(frozen=True)
class Endpoint:
    """A server: a Unix socket, or a URL with a key and an authority."""

    socket: str | None = None
    url: str = "http://localhost"
    # A key is in no log and no traceback.
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None

    def __str__(self) -> str:
        return f"unix://{self.socket}" if self.socket else self.url


def discover(
    server: str | None = None,
    api_key: str | None = None,
    ca_file: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> Endpoint:
    """Finds the server, as the command line does.

    A key and an authority of the file are for the server that the file names, and are shown
    to no other.
    """
    env = os.environ if env is None else env
    server = server or env.get(ENV_SERVER)
    file = _config_file(env)
    settings = _read(file)
    named = server or settings.get("server")
    if not named:
        return _local(_state_folder(env, os.geteuid() if uid is None else uid), file)
    if named != settings.get("server"):
        settings = {}
    return _endpoint(
        named,
        api_key or env.get(ENV_API_KEY) or settings.get("apiKey"),
        ca_file or env.get(ENV_CA_FILE) or settings.get("caFile"),
    )


def _endpoint(server: str, api_key: str | None, ca_file: str | None) -> Endpoint:
    url = urlsplit(server)
    if url.scheme == "unix" and url.path.startswith("/") and not url.netloc:
        return Endpoint(socket=url.path)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
        raise ConfigError(
            f"{server!r} is not the address of a server: use https://HOST:PORT, http://HOST:PORT or "
            f"unix:///PATH, as an argument, in {ENV_SERVER} or in the configuration file"
        )
    if ca_file is not None and not os.access(ca_file, os.R_OK):
        raise ConfigError(f"the file of the certificate authority, {ca_file}, cannot be read")
    return Endpoint(url=server.rstrip("/"), api_key=api_key, ca_file=ca_file)


def _local(state: Path, file: Path) -> Endpoint:
    socket = state.absolute() / "forkd" / "socket"
    if socket.is_socket():
        return Endpoint(socket=str(socket))
    raise NoServerError(
        f"there is no server: {ENV_SERVER} is not set, {file} names none, and no daemon listens on {socket}. "
        f"Start one with `agentrun up`, or set {ENV_SERVER} and {ENV_API_KEY}"
    )


def _state_folder(env: Mapping[str, str], uid: int) -> Path:
    """The state folder of `agentrun up`, which has the socket."""
    if env.get(ENV_STATE):
        return Path(env[ENV_STATE])
    if uid == 0:
        return Path("/var/lib/agentrun")
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"]) / "agentrun"
    return _home(env) / ".local" / "state" / "agentrun"


def _config_file(env: Mapping[str, str]) -> Path:
    if env.get("XDG_CONFIG_HOME"):
        return Path(env["XDG_CONFIG_HOME"]) / "agentrun" / "config.yaml"
    return _home(env) / ".config" / "agentrun" / "config.yaml"


def _home(env: Mapping[str, str]) -> Path:
    return Path(env["HOME"]) if env.get("HOME") else Path.home()


def _read(file: Path) -> dict[str, str]:
    try:
        with file.open(encoding="utf-8") as f:
            mode = os.fstat(f.fileno()).st_mode
            settings = _parse(f.read(), file)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"read the configuration file {file}: {e}") from e
    if "apiKey" in settings and stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"others may read {file}, which has an API key (mode {stat.S_IMODE(mode):04o}). "
            f"Run `chmod 600 {file}`"
        )
    if settings and "server" not in settings:
        raise ConfigError(f"{file} has no server, which apiKey and caFile are for")
    if "caFile" in settings:
        settings["caFile"] = str(file.parent / settings["caFile"])
    return settings


def _parse(text: str, file: Path) -> dict[str, str]:
    """Reads the YAML that this file needs: one level of `name: value`, with quotes and comments."""
    settings: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        name, colon, rest = line.partition(":")
        if not colon or name != name.strip() or (rest and not rest[0].isspace()):
            raise ConfigError(f"{file}:{number}: this is not `name: value`")
        if name not in _FIELDS:
            raise ConfigError(
                f"{file}:{number}: there is no setting {name!r}; there are {', '.join(_FIELDS)}"
            )
        if name in settings:
            raise ConfigError(f"{file}:{number}: {name} is set twice")
        settings[name] = _scalar(rest.strip(), f"{file}:{number}")
    return settings


def _scalar(text: str, where: str) -> str:
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        after = text[end + 1 :].strip() if end > 0 else ""
        value = text[1:end]
        if end < 0 or (after and not after.startswith("#")) or (text[0] == '"' and "\\" in value):
            raise ConfigError(f"{where}: the quotes do not enclose one plain value")
        return value
    value = text.split(" #", 1)[0].rstrip()
    if not value or value[0] in "[]{}&*!|>%@`,#?-" or ": " in value:
        raise ConfigError(f"{where}: a plain value belongs here; put it in quotes")
    return value
