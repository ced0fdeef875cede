"""Loads data once, tries three models on it at the same time, and keeps the best."""

from concurrent.futures import ThreadPoolExecutor

from agent_run import Sandbox

SETUP = """
import numpy as np
x = np.linspace(0, 4, 50)
y = 3 * x**2 - 2 * x + 1
"""


def error_of(fork: Sandbox, degree: int) -> float:
    code = f"model = np.polyfit(x, y, {degree}); float(np.abs(np.polyval(model, x) - y).max())"
    return float(fork.code.run(code).check().text or "nan")


with Sandbox.create("python-agent-pool") as sandbox:
    sandbox.code.run(SETUP).check()
    forks = sandbox.fork(3)
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(error_of, forks, (0, 1, 2)))
    best = errors.index(min(errors))
    print("best degree:", best)
    print("it is exact:", errors[best] < 1e-6)
    for fork in forks:
        fork.terminate()

# Prints:
# best degree: 2
# it is exact: True
