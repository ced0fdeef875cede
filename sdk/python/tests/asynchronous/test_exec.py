"""exec(text): Python in the warmed kernel, or a command."""

from __future__ import annotations

import pytest

from agent_run import AsyncAgentRun, AsyncSandbox, FailedError


@pytest.mark.parametrize(
    ("text", "kind", "exit_code", "stdout"),
    [
        ("import numpy as np; print(np.mean([1,2,3,4,5]))", "python", 0, "3.0\n"),
        ("print('hello')", "python", 0, "hello\n"),
        ("open('f','w').write('x')", "python", 0, ""),
        ("echo 'a' > g && cat g", "shell", 0, "a\n"),
        ("ls -d /etc", "shell", 0, "/etc\n"),
        ("cat f", "shell", 0, "x"),
        ("pwd", "shell", 0, "/workspace\n"),
        ("exit 3", "shell", 3, ""),
        ("no_such_name", "python", 1, ""),
    ],
)
async def test_text(sandbox: AsyncSandbox, text: str, kind: str, exit_code: int, stdout: str) -> None:
    result = await sandbox.exec(text)
    assert (result.kind, result.exit_code, result.stdout) == (kind, exit_code, stdout), result


async def test_exception(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("value = 6\n1/0")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert result.error is not None
    assert result.error.name == "ZeroDivisionError"
    with pytest.raises(FailedError, match="ZeroDivisionError") as raised:
        result.check()
    assert raised.value.result is result


async def test_exit_leaves_the_kernel(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("kept = 6")
    result = await sandbox.exec("import sys; sys.exit(7)")
    assert (result.exit_code, result.stdout, result.stderr) == (7, "", "")
    result = await sandbox.exec("kept * 7")
    assert (result.text, result.stdout, result.fresh) == ("42", "", False)
    assert result.check() is result


async def test_environment_and_timeout(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec("echo $FOR_ONE", env={"FOR_ONE": "yes"})).stdout == "yes\n"
    assert (await sandbox.exec("echo $FOR_ONE")).stdout == "\n"
    result = await sandbox.exec("sleep 600", timeout=0.2)
    assert (result.kind, result.timed_out, result.exit_code) == ("shell", True, 130)


async def test_output_as_it_comes(sandbox: AsyncSandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    result = await sandbox.exec("echo one; echo two >&2; exit 5", on_stdout=out.append, on_stderr=err.append)
    assert (result.kind, result.exit_code, result.stdout, result.stderr) == ("shell", 5, "one\n", "two\n")
    assert ("".join(out), "".join(err)) == ("one\n", "two\n")


async def test_image_without_python(client: AsyncAgentRun) -> None:
    async with await client.create("shell-only-pool") as sandbox:
        result = await sandbox.exec("echo $((6 * 7))")
        assert (result.kind, result.stdout) == ("shell", "42\n")
        result = await sandbox.exec("print(1)")
        assert (result.kind, result.exit_code != 0) == ("shell", True)
