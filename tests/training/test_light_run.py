"""A plain run imports what it uses: what adapters, pictures, engines or a cluster need is imported by the runs that have them."""

import importlib
import json
import sys
from pathlib import Path

from doubles.forked import Forked

MAX_MODULES = (
    182  # of policygrad; one more needs a reason, as have: memory that may run out, texts that are too long for a pass,
)
# chains that mean nothing, divergences over part of the vocabulary, and gates that keep a gradient beyond their bounds
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


def train_afresh(file: Path, argv: list[str]) -> int:
    """Run the command with policygrad imported anew, and write the names of its modules to a file."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "policygrad"]:
        del sys.modules[name]
    cli = importlib.import_module("policygrad.cli")
    code: int = cli.main(argv)
    file.write_text(json.dumps([name for name in sys.modules if name.partition(".")[0] == "policygrad"]))
    return code


def test_a_plain_run_imports_only_what_it_uses(random_model: Path, tmp_path: Path, forked: Forked) -> None:
    options = ["--model", random_model, "--output", tmp_path / "run", "--plain", "--evaluation.problems", "0"]
    sizes = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "4"]
    argv = ["train", "grpo", *map(str, options), *sizes]
    assert forked.exit_code(train_afresh, tmp_path / "modules", argv) == 0
    modules = json.loads((tmp_path / "modules").read_text())
    assert not [name for name in ELSEWHERE if f"policygrad.{name}" in modules]
    assert len(modules) <= MAX_MODULES, sorted(modules)
    assert "policygrad.training.trainer" in modules
