"""mini-swe-agent as it is, for `pg.AgentProgram(function="mini_swe_agent.py:main", python="…", folder="repository")`."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM would download prices

import minisweagent.models.litellm_model  # noqa: F401 - otherwise imported late, and so in every episode: 3 s each
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

SYSTEM = "Use bash. When you are done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."


def main(example):
    """Run the agent in the episode's folder. AgentProgram's reward_command tells whether it solved its task."""
    os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"  # what the run's limits refuse is not asked for again
    # LiteLLM: any name after openai/ is for the address in OPENAI_BASE_URL; it knows no price of the policy.
    model = get_model("openai/policy", {"cost_tracking": "ignore_errors"})
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{task}}", step_limit=8, cost_limit=0
    )
    ended = agent.run(example["prompt"])["exit_status"]  # Submitted, LimitsExceeded, RepeatedFormatError
    return {"metrics": {"steps": agent.n_calls, "submitted": float(ended == "Submitted")}}
