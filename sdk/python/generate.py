"""Makes the sync half of the SDK (src/agent_run/_sync) of the async one.

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
MODULES = ("code", "commands", "files", "follow", "sandbox", "transport")
CLASSES = (
    "AgentRun",
    "Code",
    "Commands",
    "Execution",
    "Files",
    "Follower",
    "Process",
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
    "anext": "next",
}
HEADER = "# Made by generate.py of _async/{name}.py: change that one.\n"


def write(folder: Path) -> None:
    """Writes all modules into a folder."""
    rule = unasync.Rule(fromdir="/_async/", todir="/_sync/", additional_replacements=NAMES)
    for module in MODULES:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "_async" / f"{module}.py"
            source.parent.mkdir()
            source.write_text((PACKAGE / "_async" / f"{module}.py").read_text())
            unasync.unasync_files([str(source)], [rule])
            made = (Path(scratch) / "_sync" / f"{module}.py").read_text()
        (folder / f"{module}.py").write_text(HEADER.format(name=module) + made)
    files = [str(folder / f"{module}.py") for module in MODULES]
    config = str(HERE / "pyproject.toml")
    for step in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *step, "--config", config, *files], check=True)  # noqa: S603


def main() -> int:
    if sys.argv[1:] != ["--check"]:
        write(PACKAGE / "_sync")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        stale = [
            module
            for module in MODULES
            if (Path(scratch) / f"{module}.py").read_text()
            != (PACKAGE / "_sync" / f"{module}.py").read_text()
        ]
    if stale:
        print(
            f"generate.py: run it: _sync is not made of _async as it is now ({', '.join(stale)})",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
