"""An MCP server of the standard library alone, which writes its replies in the way that the called tool is named after.

`python odd_mcp_server.py [TOOL …]`; by default it lists the names of all ways.
"""

import json
import sys

WAYS = {
    "plain": lambda reply: json.dumps(reply).encode(),
    "surrogate": lambda reply: json.dumps(reply).replace("done", "d\\ud83dne").encode(),
    "latin1": lambda reply: json.dumps(reply).replace("done", "dön").encode("latin-1"),
    "bom": lambda reply: b"\xef\xbb\xbf" + json.dumps(reply).encode(),
    "pretty": lambda reply: json.dumps(reply, indent=2).encode(),
    "after_logs": lambda reply: b"{'level': 'info'}\n{\nno JSON\n}\n" + json.dumps(reply).encode(),
}
SCHEMA = {"type": "object", "properties": {}}


def main(names: list[str]) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        name = message.get("params", {}).get("name", "plain")
        if message["method"] == "initialize":
            version = message["params"]["protocolVersion"]
            result = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"},
            }
            name = "plain"
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": name, "inputSchema": SCHEMA} for name in names]}
        else:
            result = {"content": [{"type": "text", "text": "done"}]}
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        sys.stdout.buffer.write(WAYS.get(name, WAYS["plain"])(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or list(WAYS))
