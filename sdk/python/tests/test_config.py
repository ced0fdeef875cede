"""Where a client finds its server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_run import AgentRun, ConfigError, NoServerError
from agent_run._config import Endpoint, discover


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def config(home: Path, text: str, mode: int = 0o600) -> Path:
    file = home / ".config" / "agentrun" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    file.chmod(mode)
    return file


@pytest.fixture
def listening(home: Path) -> Iterator[Path]:
    """The socket of a daemon of this user."""
    path = home / ".local" / "state" / "agentrun" / "forkd" / "socket"
    path.parent.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
            yield path
    finally:
        os.chdir(before)


def find(
    home: Path, uid: int = 1000, server: str | None = None, key: str | None = None, **env: str
) -> Endpoint:
    return discover(server, key, env={"HOME": str(home), **env}, uid=uid)


def test_order(home: Path, listening: Path) -> None:
    assert find(home) == Endpoint(socket=str(listening))
    state = str(listening.parent.parent)
    assert find(home, uid=0, AGENTRUN_STATE=state) == Endpoint(socket=str(listening))
    config(home, "server: https://file:1\napiKey: file-key\n")
    assert find(home) == Endpoint(url="https://file:1", api_key="file-key")
    assert find(home, AGENTRUN_STATE=state) == find(home)
    env = "https://env:1"
    named = find(home, AGENTRUN_SERVER=env, AGENTRUN_STATE=state, AGENTRUN_API_KEY="k")
    assert named == Endpoint(url=env, api_key="k")
    assert find(home, server="http://argument:1/", AGENTRUN_SERVER=env) == Endpoint(url="http://argument:1")
    assert find(home, server=f"unix://{listening}", AGENTRUN_SERVER=env) == Endpoint(socket=str(listening))


def test_keys_stay_with_their_server(home: Path) -> None:
    authority = home / "ca.pem"
    authority.write_text("")
    config(home, "server: https://file:1\napiKey: file-key\ncaFile: ../../ca.pem\n")
    assert find(home, server="https://other:1") == Endpoint(url="https://other:1")
    assert find(home, AGENTRUN_SERVER="https://other:1") == Endpoint(url="https://other:1")
    assert find(home, AGENTRUN_SERVER="https://file:1") == find(home)
    assert find(home, AGENTRUN_API_KEY="mine").api_key == "mine"
    assert Path(find(home).ca_file or "").samefile(authority)
    assert find(home, key="argument", AGENTRUN_API_KEY="env").api_key == "argument"
    assert "file-key" not in repr(find(home)) + str(find(home))


def test_state_folders(home: Path) -> None:
    with pytest.raises(NoServerError, match=r"/var/lib/agentrun/forkd/socket\. Start one with `agentrun up`"):
        find(home, uid=0)
    with pytest.raises(NoServerError, match=f"{home}/.local/state/agentrun/forkd/socket"):
        find(home)
    with pytest.raises(NoServerError, match="/elsewhere/agentrun/forkd/socket"):
        find(home, XDG_STATE_HOME="/elsewhere")
    with pytest.raises(NoServerError, match="/chosen/forkd/socket"):
        find(home, AGENTRUN_STATE="/chosen")


def test_bare_client_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRUN_STATE", str(home))
    with pytest.raises(NoServerError, match=r"agentrun up.*AGENTRUN_SERVER"):
        AgentRun()


@pytest.mark.parametrize(
    "address",
    [
        "host:1",
        "ftp://host",
        "https://",
        "https://host/?a=b",
        "https://user:pw@host",
        "unix://host/path",
        "unix:relative",
    ],
)
def test_bad_addresses(home: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="AGENTRUN_SERVER"):
        find(home, AGENTRUN_SERVER=address)


def test_missing_authority(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        find(home, AGENTRUN_SERVER="https://host", AGENTRUN_CA_FILE="/nowhere.pem")


@pytest.mark.parametrize(
    ("text", "server", "key"),
    [
        ("server: https://a:1", "https://a:1", None),
        ("---\n# mine\nserver: 'https://a:1'  # here\n\napiKey: \"k#1\"\n", "https://a:1", "k#1"),
        ("server: https://a:1 # here\r\napiKey: k#1\r\n", "https://a:1", "k#1"),
        ("apiKey: k\nserver:\thttps://a:1", "https://a:1", "k"),
    ],
)
def test_file(home: Path, text: str, server: str, key: str | None) -> None:
    config(home, text)
    assert find(home) == Endpoint(url=server, api_key=key)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server https://a", r"config\.yaml:1: this is not `name: value`"),
        ("servers: https://a", r"config\.yaml:1: there is no setting 'servers'"),
        ("server: https://a\nserver: https://b", r"config\.yaml:2: server is set twice"),
        (" server: https://a", "not `name: value`"),
        ("server:", "a plain value"),
        ("server: [https://a]", "a plain value"),
        ("server: &x https://a", "a plain value"),
        ("server: |\n  https://a", "a plain value"),
        ("server: a: b", "a plain value"),
        ("server: 'https://a", "quotes"),
        ("server: 'https://a' b", "quotes"),
        ('server: "a\\x"', "quotes"),
        ("server: a\x00\nb", "not `name: value`"),
        ("apiKey: k", "has no server"),
        ("server: not-a-url", "not the address of a server"),
    ],
)
def test_bad_files(home: Path, text: str, problem: str) -> None:
    config(home, text)
    with pytest.raises(ConfigError, match=problem):
        find(home)


def test_unreadable_files(home: Path) -> None:
    file = config(home, "server: https://a\napiKey: k", 0o640)
    with pytest.raises(ConfigError, match=r"others may read .*0640.*chmod 600"):
        find(home)
    file.write_bytes(b"server: \xff")
    with pytest.raises(ConfigError, match="read the configuration file"):
        find(home)
    file.write_text("server: https://a")  # others may read what is no secret
    assert find(home).url == "https://a"
    assert find(home, XDG_CONFIG_HOME=str(file.parent.parent)).url == "https://a"
