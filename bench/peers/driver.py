"""Drives microsandbox for `build/bench peers`.

A JSON request per line comes on stdin, {"op": NAME, ...}; a JSON answer per line
goes to stdout, {"result": {...}} or {"error": TEXT}. Times are milliseconds.
"""

import asyncio
import json
import os
import sys
import time

TICK = ["-c", "while :; do echo; usleep 2000; done"]


class Driver:
    def __init__(self):
        from microsandbox import Image, Sandbox, Snapshot  # "load" reports what is missing

        self.Image, self.Sandbox, self.Snapshot = Image, Sandbox, Snapshot
        self.source = self.snapshot = None
        self.count = 0

    async def load(self, archive, memory_mib, cpus, program):
        self.memory_mib, self.cpus, self.program = memory_mib, cpus, program
        images = await self.Image.load(archive)
        self.image = images[0].reference
        return {}

    def name(self, kind):
        self.count += 1
        return f"{kind}{self.count}"

    async def end(self, sandbox):
        name = await sandbox.name
        await sandbox.kill()
        await self.Sandbox.remove(name)

    async def run(self, sandbox):
        out = await sandbox.exec(self.program, [])
        if out.exit_code != 0:
            raise RuntimeError(f"{self.program} returned {out.exit_code}: {out.stderr_text}")

    async def boot(self):
        if self.source:
            await self.end(self.source)
        clock = Clock()
        self.source = await self.Sandbox.create(
            self.name("source"), image=self.image, memory=self.memory_mib, cpus=self.cpus
        )
        returned = clock.ms()
        await self.source.ping()
        answered = clock.ms()
        await self.run(self.source)
        return {"returned_ms": returned, "answered_ms": answered, "executed_ms": clock.ms()}

    async def ping(self):
        clock = Clock()
        await self.source.ping()
        return {"ms": clock.ms()}

    async def exec(self):
        clock = Clock()
        await self.run(self.source)
        return {"ms": clock.ms()}

    async def freeze(self):
        clock = Clock()
        self.snapshot = await self.Snapshot.create(
            self.name("snapshot"), from_sandbox=await self.source.name, full=True
        )
        return {"ms": clock.ms()}

    async def fork(self):
        name = self.name("fork")
        clock = Clock()
        return await self.measure(name, clock, await self.source.fork(name))

    async def restore(self):
        name = self.name("restored")
        clock = Clock()
        child = await self.Sandbox.restore(self.snapshot, name=name, cow_memory=True)
        return await self.measure(name, clock, child)

    async def measure(self, name, clock, child):
        returned = clock.ms()
        await child.ping()
        answered = clock.ms()
        pid = process_of(name)
        fresh = private_kib(pid)
        begin = Clock()
        await self.run(child)
        executed = answered + begin.ms()
        used = private_kib(pid)
        await self.end(child)
        return {
            "returned_ms": returned,
            "answered_ms": answered,
            "executed_ms": executed,
            "own_after_answer_kib": fresh,
            "own_after_exec_kib": used,
        }

    async def live(self, dirty):
        """The longest silence of the source while it is forked."""
        out = await self.source.exec("/bin/sh", ["-c", dirty])
        if out.exit_code != 0:
            raise RuntimeError(f"dirtying memory returned {out.exit_code}: {out.stderr_text}")
        ticker = await self.source.exec_stream("/bin/sh", TICK)
        ticks = []
        enough = asyncio.Condition()

        async def listen():
            async for event in ticker:
                if event.event_type == "stdout":
                    async with enough:
                        ticks.append(time.perf_counter())
                        enough.notify_all()

        async def hear(count):
            async with enough:
                more = len(ticks) + count
                await asyncio.wait_for(enough.wait_for(lambda: len(ticks) >= more), 60)

        listener = asyncio.create_task(listen())
        await hear(20)
        quiet = longest_gap(ticks)
        begin = len(ticks) - 1
        child = await self.source.fork(self.name("live"))
        await hear(5)
        silence = longest_gap(ticks[begin:])
        await ticker.kill()
        listener.cancel()
        await self.end(child)
        return {"silence_ms": silence, "quiet_ms": quiet}

    async def stop(self):
        if self.source:
            await self.end(self.source)
        return {}


class Clock:
    def __init__(self):
        self.begin = time.perf_counter()

    def ms(self):
        return (time.perf_counter() - self.begin) * 1000


def longest_gap(ticks):
    return max(b - a for a, b in zip(ticks, ticks[1:])) * 1000


def process_of(name):
    """The process of a sandbox: msb machine … --name NAME …"""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as f:
                words = f.read().split("\0")
        except OSError:
            continue  # it has ended
        if "--name" in words and words[words.index("--name") + 1] == name:
            return pid
    raise RuntimeError(f"no process of sandbox {name}")


def private_kib(pid):
    """Anonymous pages: what no file and no other process has."""
    with open(f"/proc/{pid}/smaps_rollup") as f:
        for line in f:
            if line.startswith("Anonymous:"):
                return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/smaps_rollup does not say how much is anonymous")


async def main():
    driver = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            driver = driver or Driver()
            answer = {"result": await getattr(driver, request.pop("op"))(**request)}
        except Exception as error:  # whatever it is, the other side reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


asyncio.run(main())
