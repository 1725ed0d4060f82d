"""What runs first behind a wall: it gives up what it has, says that it is ready, and becomes the program."""

import ast
import json
import os
import sys
import types
from typing import Any

_READY = b"ready"


def main(descriptor: int) -> None:
    """Read the task from this file, confine this process for good, and do it."""
    with open(descriptor, encoding="utf-8") as file:
        task: dict[str, Any] = json.load(file)
    from policygrad.sandbox import calls  # before the walls close

    try:
        confine(task["orders"], task["limits"])
    except OSError as error:
        os.write(task["ready"], str(error).encode())
        os._exit(1)
    os.write(task["ready"], _READY)
    os.close(task["ready"])
    sys.path.remove(task["packages"])
    sys.argv[:] = ["program.py"]
    if task["role"] == "program":
        _become(task["source"], show=task["show"])
    elif task["role"] == "candidate":
        calls.serve(task["source"], *task["pipes"])
    else:
        asks, answers = task["pipes"]
        calls.examine(task["examination"], asks, answers, task["verdict"])


def confine(orders: dict[str, Any], limits: dict[str, Any] | None) -> None:
    """Put up what the wall leaves to the process itself. It cannot be undone. Raises OSError."""
    from policygrad.sandbox import landlock, privileges, seccomp

    privileges.drop()
    if orders["alone"]:
        privileges.end_with_parent()
    if limits is not None:
        privileges.limit(**limits)
    rules = orders["landlock"]
    if rules is not None:
        landlock.restrict(rules["readable"], rules["writable"], folders=not orders["alone"])
    seccomp.install(alone=orders["alone"], attributes=rules is not None)


def _become(source: str, *, show: bool) -> None:
    """Run the source as a script would run. show: print the value of an expression at its end, as a console does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    tree = ast.parse(source, "program.py")
    last = tree.body.pop() if show and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "program.py", "eval"), module.__dict__)
        if value is not None:
            print(repr(value))
