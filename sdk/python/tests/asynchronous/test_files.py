"""Files: text and bytes, streams, folders, changes."""

from __future__ import annotations

import io

import pytest

from agent_run import AgentRunError, AsyncSandbox, errors

BINARY = bytes(range(256)) * 4096 * 5  # 5 MiB


async def test_text_and_bytes(sandbox: AsyncSandbox) -> None:
    assert await sandbox.files.write("/workspace/data.json", '{"key": "välue"}') == 17
    assert await sandbox.files.read("data.json") == '{"key": "välue"}'
    assert await sandbox.files.read_bytes("data.json", offset=1, length=5) == b'"key"'
    await sandbox.files.write("data.bin", b"\xff\x00")
    assert await sandbox.files.read_bytes("data.bin") == b"\xff\x00"
    with pytest.raises(UnicodeDecodeError):
        await sandbox.files.read("data.bin")
    assert await sandbox.files.read("data.bin", encoding="latin-1") == "\xff\x00"
    await sandbox.files.write("empty", "")
    assert await sandbox.files.read("empty") == ""


async def test_streams(sandbox: AsyncSandbox) -> None:
    assert await sandbox.files.write("large", io.BytesIO(BINARY)) == len(BINARY)
    got, pieces = b"", 0
    async for piece in sandbox.files.stream("large"):
        got, pieces = got + piece, pieces + 1
    assert got == BINARY
    assert pieces > 1
    await sandbox.files.write("pieces", (part for part in (b"a", b"", b"b")))
    assert await sandbox.files.read("pieces") == "ab"
    with pytest.raises(TypeError, match="binary mode"):
        await sandbox.files.write("text", io.StringIO("x"))  # type: ignore[arg-type]


async def test_ways_to_write(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("new/folder/log", "a\n", mode=0o600)
    assert await sandbox.files.write("new/folder/log", "b\n", append=True) == 4
    assert (await sandbox.files.stat("new/folder/log")).mode == 0o600
    with pytest.raises(FileExistsError) as exists:
        await sandbox.files.write("new/folder/log", "c", exclusive=True)
    assert isinstance(exists.value, errors.SandboxFileExistsError)
    assert await sandbox.files.read("new/folder/log") == "a\nb\n"


async def test_folders(sandbox: AsyncSandbox) -> None:
    await sandbox.files.mkdir("tree/inner", mode=0o750)
    await sandbox.files.write("tree/inner/leaf", "x")
    await sandbox.run(["ln", "-s", "inner", "tree/link"])
    assert [f.path for f in await sandbox.files.list("tree")] == [
        "/workspace/tree/inner",
        "/workspace/tree/link",
    ]
    deep = {f.name: f for f in await sandbox.files.list("tree", depth=2)}
    assert (deep["leaf"].type, deep["leaf"].size, deep["inner"].type, deep["inner"].mode) == (
        "file",
        1,
        "folder",
        0o750,
    )
    assert (deep["link"].type, deep["link"].target) == ("symlink", "inner")
    assert (await sandbox.files.stat("tree/link")).type == "folder"
    assert (await sandbox.files.stat("tree/link", follow=False)).type == "symlink"
    with pytest.raises(FileExistsError):
        await sandbox.files.mkdir("tree", parents=False)
    await sandbox.files.move("tree/inner/leaf", "tree/moved")
    assert await sandbox.files.exists("tree/moved")
    assert not await sandbox.files.exists("tree/inner/leaf")
    with pytest.raises(errors.ApiError):
        await sandbox.files.remove("tree")
    await sandbox.files.remove("tree", recursive=True)
    assert not await sandbox.files.exists("tree")


async def test_pages(sandbox: AsyncSandbox) -> None:
    await sandbox.run("mkdir many && cd many && seq 1 1500 | xargs touch")
    assert len({f.name for f in await sandbox.files.list("many")}) == 1500


async def test_what_is_missing(sandbox: AsyncSandbox) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere") as missing:
        await sandbox.files.read("nowhere")
    assert isinstance(missing.value, errors.SandboxFileNotFoundError)
    assert (missing.value.code, missing.value.status) == ("file_not_found", 404)
    with pytest.raises(FileNotFoundError):
        await sandbox.files.remove("nowhere")
    with pytest.raises(errors.InvalidError, match="path"):
        await sandbox.files.read("a\x00b")


async def test_watch(sandbox: AsyncSandbox) -> None:
    await sandbox.files.mkdir("watched")
    seen: list[tuple[str, str | None]] = []
    async with sandbox.files.watch("watched", recursive=True) as changes:
        await sandbox.run("echo 1 > watched/one; rm watched/one; rmdir watched")
        async for change in changes:
            seen.append((change.type, change.path))
    assert ("create", "/workspace/watched/one") in seen
    assert ("remove", "/workspace/watched/one") in seen
    assert seen[-1][0] == "gone"
    with pytest.raises(AgentRunError, match="with statement"):
        await anext(aiter(sandbox.files.watch(".")))
    with pytest.raises(FileNotFoundError):
        await sandbox.files.watch("nowhere").__aenter__()
