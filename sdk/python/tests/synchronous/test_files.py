# Made by generate.py of tests/asynchronous/test_files.py: change that one.
"""Files: text and bytes, streams, folders, changes."""

from __future__ import annotations

import io

import pytest

from agent_run import AgentRunError, Sandbox, errors

BINARY = bytes(range(256)) * 4096 * 5  # 5 MiB


def test_text_and_bytes(sandbox: Sandbox) -> None:
    assert sandbox.files.write("/workspace/data.json", '{"key": "välue"}') == 17
    assert sandbox.files.read("data.json") == '{"key": "välue"}'
    assert sandbox.files.read_bytes("data.json", offset=1, length=5) == b'"key"'
    sandbox.files.write("data.bin", b"\xff\x00")
    assert sandbox.files.read_bytes("data.bin") == b"\xff\x00"
    with pytest.raises(UnicodeDecodeError):
        sandbox.files.read("data.bin")
    assert sandbox.files.read("data.bin", encoding="latin-1") == "\xff\x00"
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_streams(sandbox: Sandbox) -> None:
    assert sandbox.files.write("large", io.BytesIO(BINARY)) == len(BINARY)
    got, pieces = b"", 0
    for piece in sandbox.files.stream("large"):
        got, pieces = got + piece, pieces + 1
    assert got == BINARY
    assert pieces > 1
    sandbox.files.write("pieces", (part for part in (b"a", b"", b"b")))
    assert sandbox.files.read("pieces") == "ab"
    with pytest.raises(TypeError, match="binary mode"):
        sandbox.files.write("text", io.StringIO("x"))  # type: ignore[arg-type]


def test_ways_to_write(sandbox: Sandbox) -> None:
    sandbox.files.write("new/folder/log", "a\n", mode=0o600)
    assert sandbox.files.write("new/folder/log", "b\n", append=True) == 4
    assert (sandbox.files.stat("new/folder/log")).mode == 0o600
    with pytest.raises(FileExistsError) as exists:
        sandbox.files.write("new/folder/log", "c", exclusive=True)
    assert isinstance(exists.value, errors.SandboxFileExistsError)
    assert sandbox.files.read("new/folder/log") == "a\nb\n"


def test_folders(sandbox: Sandbox) -> None:
    sandbox.files.mkdir("tree/inner", mode=0o750)
    sandbox.files.write("tree/inner/leaf", "x")
    sandbox.run(["ln", "-s", "inner", "tree/link"])
    assert [f.path for f in sandbox.files.list("tree")] == [
        "/workspace/tree/inner",
        "/workspace/tree/link",
    ]
    deep = {f.name: f for f in sandbox.files.list("tree", depth=2)}
    assert (deep["leaf"].type, deep["leaf"].size, deep["inner"].type, deep["inner"].mode) == (
        "file",
        1,
        "folder",
        0o750,
    )
    assert (deep["link"].type, deep["link"].target) == ("symlink", "inner")
    assert (sandbox.files.stat("tree/link")).type == "folder"
    assert (sandbox.files.stat("tree/link", follow=False)).type == "symlink"
    with pytest.raises(FileExistsError):
        sandbox.files.mkdir("tree", parents=False)
    sandbox.files.move("tree/inner/leaf", "tree/moved")
    assert sandbox.files.exists("tree/moved")
    assert not sandbox.files.exists("tree/inner/leaf")
    with pytest.raises(errors.ApiError):
        sandbox.files.remove("tree")
    sandbox.files.remove("tree", recursive=True)
    assert not sandbox.files.exists("tree")


def test_pages(sandbox: Sandbox) -> None:
    sandbox.run("mkdir many && cd many && seq 1 1500 | xargs touch")
    assert len({f.name for f in sandbox.files.list("many")}) == 1500


def test_what_is_missing(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere") as missing:
        sandbox.files.read("nowhere")
    assert isinstance(missing.value, errors.SandboxFileNotFoundError)
    assert (missing.value.code, missing.value.status) == ("file_not_found", 404)
    with pytest.raises(FileNotFoundError):
        sandbox.files.remove("nowhere")
    with pytest.raises(errors.InvalidError, match="path"):
        sandbox.files.read("a\x00b")


def test_watch(sandbox: Sandbox) -> None:
    sandbox.files.mkdir("watched")
    seen: list[tuple[str, str | None]] = []
    with sandbox.files.watch("watched", recursive=True) as changes:
        sandbox.run("echo 1 > watched/one; rm watched/one; rmdir watched")
        for change in changes:
            seen.append((change.type, change.path))
    assert ("create", "/workspace/watched/one") in seen
    assert ("remove", "/workspace/watched/one") in seen
    assert seen[-1][0] == "gone"
    with pytest.raises(AgentRunError, match="with statement"):
        next(iter(sandbox.files.watch(".")))
    with pytest.raises(FileNotFoundError):
        sandbox.files.watch("nowhere").__enter__()
