# Made by generate.py of tests/asynchronous/test_commands.py: change that one.
"""Programs: argv and shell, buffered, streamed, in the background, on a terminal."""

from __future__ import annotations

import pytest

from agent_run import FailedError, Sandbox, errors


def test_argv_is_not_for_a_shell(sandbox: Sandbox) -> None:
    result = sandbox.run(["echo", "$HOME", "a  b"])
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("$HOME a  b\n", "", 0, True)
    assert result.wall > 0


def test_shell(sandbox: Sandbox) -> None:
    result = sandbox.run("printf 'a\\nb\\n' | wc -l; echo e >&2; exit 3")
    assert (result.stdout.strip(), result.stderr, result.exit_code, result.ok) == ("2", "e\n", 3, False)
    with pytest.raises(FailedError, match="ended with 3: e"):
        result.check()


def test_options(sandbox: Sandbox) -> None:
    result = sandbox.run("cat; pwd; echo $A; id -un", stdin="in\n", cwd="/tmp", env={"A": "b"}, user="root")
    assert result.stdout == "in\n/tmp\nb\nroot\n"
    assert (sandbox.run(["wc", "-c"], stdin=b"\x00\xff")).stdout == "2\n"
    result = sandbox.run(["sleep", "600"], timeout=0.1)
    assert (result.timed_out, result.signal, result.exit_code) == (True, "SIGKILL", 137)


def test_bytes_and_bounds(sandbox: Sandbox) -> None:
    result = sandbox.run("printf '\\377\\000x'")
    assert (result.stdout_bytes, result.stdout) == (b"\xff\x00x", "\ufffd\x00x")
    result = sandbox.run("seq 1 1000", output_limit=10)
    assert (result.stdout, result.truncated) == ("1\n2\n3\n4\n5\n", True)
    pieces: list[str] = []
    result = sandbox.run("seq 1 1000", output_limit=10, on_stdout=pieces.append)
    assert (result.stdout, result.truncated) == ("1\n2\n3\n4\n5\n", True)
    assert "".join(pieces).endswith("\n999\n1000\n")


def test_stream(sandbox: Sandbox) -> None:
    # U+0085 ends a line for Python, and not for JSON.
    process = sandbox.commands.stream("printf 'a\\302\\205b'; echo c >&2; cat; exit 2", stdin="d")
    seen = {"stdout": b"", "stderr": b""}
    for piece in process:
        assert piece.offset == len(seen[piece.stream])
        seen[piece.stream] += piece.data
    assert seen == {"stdout": "a\x85bd".encode(), "stderr": b"c\n"}
    assert process.exit_code == 2
    result = process.wait()
    assert (result.stdout, result.stderr, result.exit_code, result.id) == ("a\x85bd", "c\n", 2, process.id)


def test_input_and_signals(sandbox: Sandbox) -> None:
    process = sandbox.commands.start(
        "trap 'echo got; exit 9' TERM; while read line; do echo \"<$line>\"; done", stdin=True
    )
    assert process.pid
    assert (process.info()).running
    output = iter(process)
    process.write("one\n")
    assert (next(output)).text == "<one>\n"
    process.write(b"two\n")
    assert (next(output)).text == "<two>\n"
    process.signal("TERM")
    result = process.wait()
    assert (result.exit_code, result.stdout) == (9, "<one>\n<two>\ngot\n")
    process.release()
    with pytest.raises(errors.NotFoundError):
        process.info()


def test_background_and_connect(sandbox: Sandbox) -> None:
    sandbox.commands.start("cat; echo end", id="job", stdin=True)
    job = sandbox.commands.connect("job")
    job.write("for all\n", close=True)
    first, second = job.wait(), sandbox.commands.connect("job").wait()
    assert first.stdout == second.stdout == "for all\nend\n"
    found = {info.id: info for info in sandbox.commands.list()}
    assert (found["job"].running, found["job"].exit_code, found["job"].argv) == (
        False,
        0,
        ["/bin/sh", "-c", "cat; echo end"],
    )
    with pytest.raises(errors.AlreadyExistsError):
        sandbox.commands.start(["true"], id="job")


def test_context_kills(sandbox: Sandbox) -> None:
    with sandbox.commands.start(["sleep", "600"]) as process:
        assert (process.info()).running
    assert (process.wait()).signal == "SIGKILL"


def test_what_cannot_run(sandbox: Sandbox) -> None:
    with pytest.raises(errors.CannotRunError, match="no-such-program") as raised:
        sandbox.run(["no-such-program"])
    assert (raised.value.code, raised.value.status) == ("cannot_run", 422)
    assert raised.value.request_id
    with pytest.raises(errors.CannotRunError):
        sandbox.commands.stream(["no-such-program"]).wait()
    with pytest.raises(errors.InvalidError):
        sandbox.run([])
    with pytest.raises(ValueError, match="not the name or id"):
        sandbox.commands.connect("../../files").info()


def test_terminal(sandbox: Sandbox) -> None:
    with sandbox.pty(["/bin/sh"], rows=40, cols=100, env={"PS1": "ready> "}) as terminal:
        seen = ""
        for piece in terminal:
            seen += piece.text
            if seen.endswith("ready> ") and "40 100" not in seen:
                terminal.write("stty size\n")
            elif seen.endswith("ready> ") and "50 120" not in seen:
                terminal.resize(50, 120)
                terminal.write("stty size; tty\n")
            elif seen.endswith("ready> "):
                terminal.close_stdin()
        assert "\r\n40 100\r\n" in seen
        assert "\r\n50 120\r\n/dev/pts/" in seen
        assert terminal.exit_code == 0


def test_terminal_has_a_shell(sandbox: Sandbox) -> None:
    with sandbox.pty() as terminal:
        terminal.write("echo $TERM $0; exit 4\n")
        result = terminal.wait()
    assert result.exit_code == 4
    assert "xterm-256color /usr/bin/bash" in result.stdout.replace("\r\n/bin", "/bin")
