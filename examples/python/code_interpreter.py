"""A tool for a model: runs what it writes, and gives back what it needs to go on."""

from agent_run import Sandbox


def interpreter(sandbox: Sandbox, code: str) -> str:
    """What a model is told about its code: output, value, error, pictures."""
    result = sandbox.code.run(code, timeout=30)
    parts = [result.stdout.strip()]
    if result.text is not None:
        parts.append(f"value: {result.text}")
    if result.error is not None:
        parts.append(f"{result.error.name}: {result.error.value}")
    parts += [f"picture: {png[1:4].decode()}" for png in result.charts]
    return "\n".join(part for part in parts if part)


with Sandbox.create("python-agent-pool") as sandbox:
    print(interpreter(sandbox, "data = [3, 1, 2]\nprint('loaded')\nlen(data)"))
    print(interpreter(sandbox, "sorted(data)[5]"))
    print(interpreter(sandbox, "import matplotlib.pyplot as plt\nplt.bar(range(3), data)\nplt.show()"))

# Prints:
# loaded
# value: 3
# IndexError: list index out of range
# picture: PNG
