"""An MCP server of the standard library alone, which starts at once: `python light_mcp_server.py [FOLDER]`.

For tests of when servers start and end; what the package mcp's own classes say is for mcp_server.py, with the same tools.
FOLDER gets a file for each process that serves, named by its id, with the id of a process that it has started; and HANGING.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

HANGING = "hanging"  # a file in FOLDER once a call of the tool `hangs` has come
NUMBER = {"type": "integer"}
TOOLS = {
    "add": ("Adds two numbers.", {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]}),
    "count": ("Counts the calls of the process.", {"type": "object", "properties": {}}),
    "crashes": ("Ends the server.", {"type": "object", "properties": {}}),
    "hangs": ("Answers much too late.", {"type": "object", "properties": {}}),
}


def serve() -> None:
    """Answer each line of the standard input with a line."""
    calls = 0
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        given = message.get("params", {})
        if message["method"] == "initialize":
            result = {
                "protocolVersion": given["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "light", "version": "1"},
            }
        elif message["method"] == "tools/list":
            rows = [
                {"name": name, "description": says, "inputSchema": schema} for name, (says, schema) in TOOLS.items()
            ]
            result = {"tools": rows}
        else:
            name, numbers = given["name"], given.get("arguments", {})
            if name == "crashes":
                os._exit(7)
            if name == "hangs":
                if sys.argv[1:]:
                    Path(sys.argv[1], HANGING).touch()
                threading.Event().wait(600)
            calls += name == "count"
            number = calls if name == "count" else numbers["a"] + numbers.get("b", 0)
            result = {"content": [{"type": "text", "text": str(number)}]}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(sys.argv[1], str(os.getpid())).write_text(str(child.pid))
    serve()
