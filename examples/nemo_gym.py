"""Train on a resources server of NeMo Gym: its tools, its sessions, its verifier.

The server is started as its documentation says. Its data set is the task, and this file the agent between it and the policy:

    NEMO_GYM=http://localhost:8001 policygrad train grpo --model my-model --task example.jsonl --row-map nemo_gym.py:read_row \
        --environment agent:nemo_gym.py:main --environment.env NEMO_GYM
"""

import json
import os
from typing import Any

import httpx

MAX_TURNS = 20


def read_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a NeMo Gym data set with its last message as the prompt that logs show."""
    messages = row["responses_create_params"]["input"]
    return {"prompt": messages if isinstance(messages, str) else messages[-1]["content"], **row}


def main(example: dict[str, Any]) -> dict[str, Any]:
    """Play an episode; the reward and its metrics are what the server's verifier says."""
    row = {name: value for name, value in example.items() if name != "prompt"}
    request, said = row["responses_create_params"], list[dict[str, Any]]()
    messages = request["input"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    policy = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/responses"
    with httpx.Client(base_url=os.environ["NEMO_GYM"], timeout=120) as server:  # it keeps the session's cookie
        server.post("/seed_session", json=row).raise_for_status()
        for _ in range(MAX_TURNS):
            body = {"model": "policy", **request, "input": [*messages, *said]}
            response = httpx.post(url, json=body, headers=policy, timeout=None).raise_for_status().json()
            said += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            said += [call_tool(server, call) for call in calls]
            if not calls:
                break
        verified = (
            server.post("/verify", json={**row, "response": {**response, "output": said}}).raise_for_status().json()
        )
    numbers = {
        name: float(value) for name, value in verified.items() if name not in row and isinstance(value, (int, float))
    }
    return {"reward": numbers.pop("reward"), "metrics": numbers}


def call_tool(server: httpx.Client, call: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a tool, which is an endpoint of its name; errors are for the policy to read."""
    try:
        output = server.post(f"/{call['name']}", json=json.loads(call["arguments"])).text
    except ValueError as error:
        output = f"the arguments are no JSON: {error}"
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}
