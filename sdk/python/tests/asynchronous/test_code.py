"""Code in kernels: values, pictures, errors, contexts, streams, interrupts."""

from __future__ import annotations

import pytest

from agent_run import AsyncSandbox, CodeError, CodeEvent, FailedError, Mime, Output, errors

CHART = """
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
plt.plot([1, 4, 9])
plt.show()
"""

RICH = """
class Rich:
    def __repr__(self): return "plain"
    def _repr_html_(self): return "<b>rich</b>"
    def _repr_json_(self): return {"a": [1, None]}
    def _repr_svg_(self): return "<svg/>"
Rich()
"""


async def test_value_apart_from_output(sandbox: AsyncSandbox) -> None:
    result = await sandbox.code.run("x = 20\nprint(x)\nx + 22", language="python")
    assert (result.stdout, result.text, result.status, result.exit_code) == ("20\n", "42", "ok", 0)
    assert (result.language, result.context, result.error) == ("python", "default", None)
    assert (await sandbox.code.run("x")).text == "20"


async def test_chart(sandbox: AsyncSandbox) -> None:
    result = (await sandbox.code.run(CHART)).check()
    (chart,) = result.charts
    assert chart.startswith(b"\x89PNG\r\n\x1a\n")
    assert result.displays[0].png == chart


async def test_rich_value(sandbox: AsyncSandbox) -> None:
    value = (await sandbox.code.run(RICH)).check().result
    assert value is not None
    assert (value.text, value.html, value.json, value.svg) == (
        "plain",
        "<b>rich</b>",
        {"a": [1, None]},
        "<svg/>",
    )
    assert (value.png, value.jpeg) == (None, None)
    assert value["text/plain"] == "plain"
    assert "text/html" in list(value)


async def test_error(sandbox: AsyncSandbox) -> None:
    result = await sandbox.code.run("{}['missing']")
    assert (result.status, result.exit_code, result.ok) == ("raised", 1, False)
    assert result.error is not None
    assert (result.error.name, result.error.value) == ("KeyError", "'missing'")
    assert "Traceback" in result.error.traceback
    with pytest.raises(FailedError, match="KeyError"):
        result.check()


async def test_callbacks(sandbox: AsyncSandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    results: list[Mime] = []
    displays: list[Mime] = []
    raised: list[CodeError] = []
    code = "import sys\nprint('o')\nprint('e', file=sys.stderr)\ndisplay('d')\n"
    for last in ("7", "1/0"):
        result = await sandbox.code.run(
            code + last,
            on_stdout=out.append,
            on_stderr=err.append,
            on_result=results.append,
            on_display=displays.append,
            on_error=raised.append,
        )
        assert (result.stdout, [d.text for d in result.displays]) == ("o\n", ["'d'"])
    assert result.error == raised[0]
    assert ("".join(out), "".join(err)[:4]) == ("o\no\n", "e\ne\n")
    assert ([r.text for r in results], len(displays), raised[0].name) == (["7"], 2, "ZeroDivisionError")


async def test_stream(sandbox: AsyncSandbox) -> None:
    execution = sandbox.code.stream("print('first')\ndisplay(1)\nprint('second')\n2")
    seen: list[str | None] = []
    async for event in execution:
        if isinstance(event, Output):
            seen += event.text.split()
        elif isinstance(event, CodeEvent) and event.value is not None:
            seen.append(event.value.text)
    assert sorted(str(each) for each in seen) == ["1", "2", "first", "second"]
    result = await execution.wait()
    assert (result.stdout, result.text, result.id) == ("first\nsecond\n", "2", execution.id)


async def test_background_and_connect(sandbox: AsyncSandbox) -> None:
    execution = await sandbox.code.start(
        "print('begun', flush=True)\nimport time\ntime.sleep(600)", id="long"
    )
    async for event in execution:
        if isinstance(event, Output):
            assert event.text == "begun\n"
            break
    await sandbox.code.connect("long").interrupt()
    result = await execution.wait()
    assert (result.status, result.exit_code, result.stdout) == ("interrupted", 130, "begun\n")
    again = await sandbox.code.connect("long").wait()
    assert (again.status, again.stdout, again.context) == ("interrupted", "begun\n", "default")
    await execution.release()
    with pytest.raises(errors.NotFoundError):
        await sandbox.code.connect("long").wait()


async def test_contexts(sandbox: AsyncSandbox) -> None:
    one = await sandbox.code.create_context("one", cwd="/tmp", env={"WHO": "one"}, start=True)
    assert (one.id, one.language, one.cwd) == ("one", "python", "/tmp")
    code = "import os; who = os.environ['WHO'], os.getcwd(); who"
    assert (await sandbox.code.run(code, context=one)).text == "('one', '/tmp')"
    assert (await sandbox.code.run("who")).error is not None
    assert (await sandbox.exec("who[0]", context=one)).text == "'one'"
    assert {"default", "one"} <= {each.id for each in await sandbox.code.contexts()}
    await sandbox.code.restart_context(one)
    result = await sandbox.code.run("'who' in globals()", context="one")
    assert (result.text, result.fresh) == ("False", True)
    await sandbox.code.delete_context(one)
    assert "one" not in {each.id for each in await sandbox.code.contexts()}


async def test_shell_kernel(sandbox: AsyncSandbox) -> None:
    await sandbox.code.run("cd /tmp; X=5", language="bash")
    result = await sandbox.code.run("echo $PWD $X; false", language="bash")
    assert (result.stdout, result.exit_code, result.language) == ("/tmp 5\n", 1, "bash")


async def test_timeout(sandbox: AsyncSandbox) -> None:
    result = await sandbox.code.run("while True: pass", timeout="200ms")
    assert (result.timed_out, result.status) == (True, "interrupted")
    assert (await sandbox.code.run("1")).fresh is False
