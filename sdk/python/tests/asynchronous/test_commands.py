"""Programs: argv and shell, buffered, streamed, in the background, on a terminal."""

from __future__ import annotations

import pytest

from agent_run import AsyncSandbox, FailedError, errors


async def test_argv_is_not_for_a_shell(sandbox: AsyncSandbox) -> None:
    result = await sandbox.run(["echo", "$HOME", "a  b"])
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("$HOME a  b\n", "", 0, True)
    assert result.wall > 0


async def test_shell(sandbox: AsyncSandbox) -> None:
    result = await sandbox.run("printf 'a\\nb\\n' | wc -l; echo e >&2; exit 3")
    assert (result.stdout.strip(), result.stderr, result.exit_code, result.ok) == ("2", "e\n", 3, False)
    with pytest.raises(FailedError, match="ended with 3: e"):
        result.check()


async def test_options(sandbox: AsyncSandbox) -> None:
    result = await sandbox.run(
        "cat; pwd; echo $A; id -un", stdin="in\n", cwd="/tmp", env={"A": "b"}, user="root"
    )
    assert result.stdout == "in\n/tmp\nb\nroot\n"
    assert (await sandbox.run(["wc", "-c"], stdin=b"\x00\xff")).stdout == "2\n"
    result = await sandbox.run(["sleep", "600"], timeout=0.1)
    assert (result.timed_out, result.signal, result.exit_code) == (True, "SIGKILL", 137)


async def test_bytes_and_bounds(sandbox: AsyncSandbox) -> None:
    result = await sandbox.run("printf '\\377\\000x'")
    assert (result.stdout_bytes, result.stdout) == (b"\xff\x00x", "\ufffd\x00x")
    result = await sandbox.run("seq 1 1000", output_limit=10)
    assert (result.stdout, result.truncated) == ("1\n2\n3\n4\n5\n", True)
    pieces: list[str] = []
    result = await sandbox.run("seq 1 1000", output_limit=10, on_stdout=pieces.append)
    assert (result.stdout, result.truncated) == ("1\n2\n3\n4\n5\n", True)
    assert "".join(pieces).endswith("\n999\n1000\n")


async def test_stream(sandbox: AsyncSandbox) -> None:
    # U+0085 ends a line for Python, and not for JSON.
    process = sandbox.commands.stream("printf 'a\\302\\205b'; echo c >&2; cat; exit 2", stdin="d")
    seen = {"stdout": b"", "stderr": b""}
    async for piece in process:
        assert piece.offset == len(seen[piece.stream])
        seen[piece.stream] += piece.data
    assert seen == {"stdout": "a\x85bd".encode(), "stderr": b"c\n"}
    assert process.exit_code == 2
    result = await process.wait()
    assert (result.stdout, result.stderr, result.exit_code, result.id) == ("a\x85bd", "c\n", 2, process.id)


async def test_input_and_signals(sandbox: AsyncSandbox) -> None:
    process = await sandbox.commands.start(
        "trap 'echo got; exit 9' TERM; while read line; do echo \"<$line>\"; done", stdin=True
    )
    assert process.pid
    assert (await process.info()).running
    output = aiter(process)
    await process.write("one\n")
    assert (await anext(output)).text == "<one>\n"
    await process.write(b"two\n")
    assert (await anext(output)).text == "<two>\n"
    await process.signal("TERM")
    result = await process.wait()
    assert (result.exit_code, result.stdout) == (9, "<one>\n<two>\ngot\n")
    await process.release()
    with pytest.raises(errors.NotFoundError):
        await process.info()


async def test_background_and_connect(sandbox: AsyncSandbox) -> None:
    await sandbox.commands.start("cat; echo end", id="job", stdin=True)
    job = sandbox.commands.connect("job")
    await job.write("for all\n", close=True)
    first, second = await job.wait(), await sandbox.commands.connect("job").wait()
    assert first.stdout == second.stdout == "for all\nend\n"
    found = {info.id: info for info in await sandbox.commands.list()}
    assert (found["job"].running, found["job"].exit_code, found["job"].argv) == (
        False,
        0,
        ["/bin/sh", "-c", "cat; echo end"],
    )
    with pytest.raises(errors.AlreadyExistsError):
        await sandbox.commands.start(["true"], id="job")


async def test_context_kills(sandbox: AsyncSandbox) -> None:
    async with await sandbox.commands.start(["sleep", "600"]) as process:
        assert (await process.info()).running
    assert (await process.wait()).signal == "SIGKILL"


async def test_what_cannot_run(sandbox: AsyncSandbox) -> None:
    with pytest.raises(errors.CannotRunError, match="no-such-program") as raised:
        await sandbox.run(["no-such-program"])
    assert (raised.value.code, raised.value.status) == ("cannot_run", 422)
    assert raised.value.request_id
    with pytest.raises(errors.CannotRunError):
        await sandbox.commands.stream(["no-such-program"]).wait()
    with pytest.raises(errors.InvalidError):
        await sandbox.run([])
    with pytest.raises(ValueError, match="not the name or id"):
        await sandbox.commands.connect("../../files").info()


async def test_terminal(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty(["/bin/sh"], rows=40, cols=100, env={"PS1": "ready> "}) as terminal:
        seen = ""
        async for piece in terminal:
            seen += piece.text
            if seen.endswith("ready> ") and "40 100" not in seen:
                await terminal.write("stty size\n")
            elif seen.endswith("ready> ") and "50 120" not in seen:
                await terminal.resize(50, 120)
                await terminal.write("stty size; tty\n")
            elif seen.endswith("ready> "):
                await terminal.close_stdin()
        assert "\r\n40 100\r\n" in seen
        assert "\r\n50 120\r\n/dev/pts/" in seen
        assert terminal.exit_code == 0


async def test_terminal_has_a_shell(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty() as terminal:
        await terminal.write("echo $TERM $0; exit 4\n")
        result = await terminal.wait()
    assert result.exit_code == 4
    assert "xterm-256color /usr/bin/bash" in result.stdout.replace("\r\n/bin", "/bin")
