"""What users are promised, word by word: the examples of the README, of examples/, and more."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .daemon import Daemon

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT.parents[1] / "examples" / "python").glob("*.py"))

FIRST = """
from agent_run import Sandbox

sandbox = Sandbox.create("python-agent-pool")
result = sandbox.exec("import numpy as np; print(np.mean([1,2,3,4,5]))")
print(result.stdout)

fork_a, fork_b = sandbox.fork(2)
fork_a.exec("open('plan_a.txt','w').write('conservative approach')")
fork_b.exec("open('plan_b.txt','w').write('aggressive approach')")
print(fork_a.files.read("plan_a.txt"), "|", fork_b.files.read("plan_b.txt"))
print(fork_a.files.exists("plan_b.txt"), fork_b.files.exists("plan_a.txt"))
for each in (sandbox, fork_a, fork_b):
    each.terminate()
"""

SECOND = """
from agent_run import AgentRun

client = AgentRun()
sandbox = client.create("python-agent-pool")
assert sandbox.exec("print('hello')").exit_code == 0
sandbox.files.write("/workspace/data.json", '{"key": "value"}')
forks = sandbox.fork(3)
for i, fork in enumerate(forks):
    fork.exec(f"echo 'approach {i}' > /workspace/result.txt")
for fork in forks:
    print(fork.files.read("/workspace/result.txt"), fork.files.read("/workspace/data.json"))
    fork.terminate()
sandbox.terminate()
"""


def run(code: str, folder: Path) -> tuple[str, str]:
    """What a program prints that uses the SDK as it is installed, and what Python warns of."""
    env = {**os.environ, "PYTHONDEVMODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_here(code: str) -> str:
    """The same in this process, which has imported everything."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def test_first(daemon: Daemon, tmp_path: Path) -> None:  # noqa: ARG001
    shown = "3.0\n\nconservative approach | aggressive approach\nFalse False\n"
    assert run(FIRST, tmp_path) == (shown, "")


def test_second(daemon: Daemon, tmp_path: Path) -> None:  # noqa: ARG001
    data = '{"key": "value"}'
    # The client is never closed there, of which Python warns.
    assert run(SECOND, tmp_path)[0] == "".join(f"approach {i}\n {data}\n" for i in range(3))


def blocks() -> list[tuple[str, str]]:
    """Every example of the README, and what it says that it prints."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", text, re.DOTALL)
    assert len(found) >= 8
    return found


@pytest.mark.parametrize(("code", "shown"), blocks())
def test_readme(daemon: Daemon, code: str, shown: str) -> None:  # noqa: ARG001
    assert run_here(code) == shown


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples(daemon: Daemon, example: Path) -> None:  # noqa: ARG001
    """Each says at its end what it prints."""
    code, _, shown = example.read_text().partition("\n# Prints:\n")
    assert run_here(code) == re.sub(r"(?m)^# ?", "", shown)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
