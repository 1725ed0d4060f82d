"""The environment: mini-swe-agent in a copy of the repository, whose tests are the reward."""

import os

import policygrad as pg

PYTHON = os.path.abspath("agents/bin")
REPAIR = pg.AgentProgram(
    function="agent.py:main",
    python=f"{PYTHON}/python",
    folder="repair-tasks/repository",
    reward_command="python3 -I -S tests/run.py",
    restored=("tests",),
    columns=("file", "text"),
    variables={
        "PATH": f"{PYTHON}:/usr/bin:/bin",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no list of prices from the network
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # a refused completion stays refused
    },
    max_calls=8,
)
