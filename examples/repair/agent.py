"""mini-swe-agent on a bug: the episode's folder is a copy of the repository, and the bug is put into it before the agent begins.

    policygrad … --environment repair.py:REPAIR

Replies are commands as they are, without a block of code around them, and what a command prints is all that the model reads of it.
"""

import contextlib
import gc
from pathlib import Path

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

# What LiteLLM imports with its first request it would import in every episode anew, which are forks of this process.
litellm.suppress_debug_info = True
with contextlib.suppress(litellm.InternalServerError):  # nobody listens there
    litellm.completion("openai/nobody", [{"role": "user", "content": ""}], api_base="http://127.0.0.1:9", max_retries=0)
gc.freeze()


def main(example):
    """Put the bug in, and run the agent. The reward is the repository's tests (repair.py)."""
    Path(example["file"]).write_text(example["text"])
    model = LitellmTextbasedModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        action_regex=r"\A(.+)\Z",
        observation_template="{{output.output.strip() or 'done'}}",
    )
    templates = {"system_template": "bash", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates, step_limit=8, cost_limit=0)
    ended = agent.run(example["prompt"])["exit_status"]
    return {"metrics": {"steps": agent.n_calls, "submitted": float(ended == "Submitted")}}
