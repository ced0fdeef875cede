"""Makes the sync half of the SDK (src/agent_run/_sync), and its tests, of the async one.

python generate.py            writes it
python generate.py --check    fails if it is not what would be written
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

HERE = Path(__file__).parent
PACKAGE = HERE / "src" / "agent_run"
TESTS = HERE / "tests"
CLASSES = (
    "AgentRun",
    "Code",
    "Commands",
    "Execution",
    "Files",
    "Follower",
    "Network",
    "Process",
    "Reader",
    "Sandbox",
    "Terminal",
    "Transport",
    "Watch",
)
NAMES = {
    **{f"Async{name}": name for name in CLASSES},
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "aclose": "close",
    "aclosing": "closing",
    "asynccontextmanager": "contextmanager",
    "aread": "read",
    "aiter_bytes": "iter_bytes",
    "aiter": "iter",
    "anext": "next",
}
HEADER = "# Made by generate.py of {name}: change that one.\n"


def pairs() -> list[tuple[Path, Path]]:
    """Every async module and the sync one that is made of it."""
    halves = (
        (PACKAGE / "_async", PACKAGE / "_sync", "[a-z]*.py"),
        (TESTS / "asynchronous", TESTS / "synchronous", "test_*.py"),
    )
    return [
        (source, made / source.name) for given, made, names in halves for source in sorted(given.glob(names))
    ]


def make(sources: list[Path]) -> list[str]:
    """The sync texts of async modules."""
    rule = unasync.Rule(fromdir="/in/", todir="/out/", additional_replacements=NAMES)
    with tempfile.TemporaryDirectory() as scratch:
        made = []
        for number, source in enumerate(sources):
            given = Path(scratch) / "in" / str(number) / source.name
            given.parent.mkdir(parents=True)
            given.write_text(source.read_text())
            unasync.unasync_files([str(given)], [rule])
            made.append(Path(scratch) / "out" / str(number) / source.name)
            made[-1].write_text(HEADER.format(name=source.relative_to(HERE)) + made[-1].read_text())
        # Shorter names make shorter lines, and another order.
        for step in (["check", "--select", "I", "--fix"], ["format"]):
            command = [
                sys.executable,
                "-m",
                "ruff",
                *step,
                "--quiet",
                "--config",
                str(HERE / "pyproject.toml"),
                scratch,
            ]
            subprocess.run(command, check=True)  # noqa: S603
        return [file.read_text() for file in made]


def main() -> int:
    stale = []
    sources, targets = zip(*pairs(), strict=True)
    for made, text in zip(targets, make(list(sources)), strict=True):
        if sys.argv[1:] != ["--check"]:
            made.write_text(text)
        elif not made.exists() or made.read_text() != text:
            stale.append(str(made.relative_to(HERE)))
    if stale:
        print(
            f"run generate.py: not made of the async half as it is now: {', '.join(stale)}", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
