"""Follows a build as it goes, with asyncio: its output, and the files that it makes."""

import asyncio

from agent_run import AsyncSandbox

BUILD = "for step in 1 2 3; do echo step $step; echo $step > out/part-$step; done; touch out/done"


async def files_of(sandbox: AsyncSandbox, ready: asyncio.Event) -> list[str]:
    made: list[str] = []
    async with sandbox.files.watch("out") as changes:
        ready.set()
        async for change in changes:
            if change.type == "create" and change.path:
                made.append(change.path.rsplit("/", 1)[-1])
                if made[-1] == "done":
                    break
    return made


async def main() -> None:
    async with await AsyncSandbox.create("python-agent-pool") as sandbox:
        await sandbox.files.mkdir("out")
        ready = asyncio.Event()
        watching = asyncio.create_task(files_of(sandbox, ready))
        await ready.wait()
        async for piece in sandbox.commands.stream(BUILD):
            print(piece.text, end="")
        print(await watching)


asyncio.run(main())

# Prints:
# step 1
# step 2
# step 3
# ['part-1', 'part-2', 'part-3', 'done']
