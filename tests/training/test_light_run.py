"""A plain run imports what it uses: what adapters, pictures, engines or a cluster need is imported by the runs that have them."""

import json
import subprocess
import sys
from pathlib import Path

MAX_MODULES = 173  # of policygrad; one more needs a reason
ELSEWHERE = (
    *("models.adapters", "models.vision", "models.moe_routing", "models.chat_template", "models.demonstrations"),
    *("learners.local.curvature", "learners.local.auxiliary_networks", "learners.local.expert_balance"),
    *(
        "learners.local.score_norms",
        "learners.local.compilation",
        "learners.local.host_memory",
        "learners.fsdp.learner",
    ),
    *("samplers.engines.base", "samplers.local.text_cache", "weight_sync.folder"),
    *("environments.tools", "environments.agent_program", "environments.games", "rollout.conversation_tree"),
    *("rollout.evaluation", "rewards.math", "rewards.workers.worker", "tasks.mixtures", "tasks.sources"),
    *("training.best_model", "training.config.supervised", "training.distributed", "training.benchmarks"),
    *("commands.render", "utils.pictures", "utils.span_recorder", "checkpoint.shards"),
    *("proxy", "serve", "compare", "lab", "papers", "audit", "report", "verification", "cluster.launch"),
)
CODE = """
import json, sys
from policygrad.cli import main
done = main(sys.argv[1:])
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "policygrad"]))
sys.exit(done)
"""


def test_a_plain_run_imports_only_what_it_uses(random_model: Path, tmp_path: Path) -> None:
    options = ["--model", random_model, "--output", tmp_path / "run", "--plain", "--evaluation.problems", "0"]
    sizes = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "4"]
    argv = [sys.executable, "-c", CODE, "train", "grpo", *options, *sizes]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    assert not [name for name in ELSEWHERE if f"policygrad.{name}" in modules]
    assert len(modules) <= MAX_MODULES, sorted(modules)
