"""A small model behind mini-swe-agent learns to repair bugs: the commands of docs/repair.md, run from an empty folder.

    python scripts/measure_repair.py [--seeds 0 1 2] [--folder comparisons/repair] [--agents FOLDER]

Writes docs/results/repair.json, of which `make docs` makes the commands and the table of docs/repair.md. What is finished is not
run again. --agents names a virtual environment with mini-swe-agent, and spares the installation.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, RESULTS = ROOT / "examples" / "repair", ROOT / "docs" / "results" / "repair.json"
INSTALL = ("python3 -m venv agents", "agents/bin/pip install mini-swe-agent==2.4.6")
PREPARE = (
    "python make_tasks.py",
    "python make_model.py",
    "policygrad sft --model repair-tasks/blank --data repair-tasks/demonstrations.jsonl --optimizer.name muon --lr 5e-3"
    " --optimizer.schedule linear --epochs 2 --batch-size 32 --output shown",
)
TRAIN = (
    "policygrad train grpo --model shown/model --task repair-tasks/train.jsonl --eval-data repair-tasks/held-out.jsonl"
    " --environment repair.py:REPAIR --max-tokens 96 --steps 40 --prompts-per-step 8 --samples-per-prompt 8 --lr 1e-3"
    " --evaluation.samples-per-prompt 4 --seed {seed} --output repaired-{seed}"
)
HELD_OUT = 40 * 4
"""Episodes of an evaluation."""
VERIFY = "policygrad verify repaired-{seed}"


def run(command: str, folder: Path) -> tuple[int, float]:
    """Run a command of the page; return its exit code and the processor seconds of all its processes."""
    words = shlex.split(command)
    program = {"policygrad": [sys.executable, "-m", "policygrad"], "python": [sys.executable]}.get(words[0], words[:1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"$ {command}", flush=True)
    code = subprocess.run(
        [*program, *words[1:]], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def prepare(folder: Path, agents: Path | None) -> None:
    """Make everything that the runs begin with; write the processor seconds of each command to prepared.json."""
    for path in sorted(EXAMPLE.glob("*.py")):
        shutil.copy(path, folder)
    if agents is not None and not (folder / "agents").exists():
        (folder / "agents").symlink_to(agents.resolve())
    seconds = dict[str, float]()
    for command in (*(() if agents else INSTALL), *PREPARE):
        code, seconds[command] = run(command, folder)
        if code:
            raise SystemExit(f"exit code {code}: {command}")
    (folder / "prepared.json").write_text(json.dumps(seconds))


def measure(folder: Path, seed: int) -> None:
    """Train and verify with a seed; write what the commands cost and how they ended to repaired-SEED.json."""
    train, verify = TRAIN.format(seed=seed), VERIFY.format(seed=seed)
    code, seconds = run(train, folder)
    if code:
        raise SystemExit(f"exit code {code}: {train}")
    verify_code, verify_seconds = run(verify, folder)
    values = {"seconds": seconds, "verify_code": verify_code, "verify_seconds": verify_seconds}
    (folder / f"repaired-{seed}.json").write_text(json.dumps(values))


def read_run(folder: Path, seed: int) -> dict[str, Any]:
    """Return what a run came to: rates on held-out bugs with their standard errors, first and last step, the findings of verify."""
    output = folder / f"repaired-{seed}"
    values = json.loads((folder / f"repaired-{seed}.json").read_text())
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    measured = [(row["eval/reward"], row["eval/reward_stderr"]) for row in rows if "eval/reward" in row]
    steps = [row for row in rows if "environment/calls" in row]
    kept = ("reward", "environment/calls", "environment/submitted", "environment/ended_failed")
    findings = json.loads((output / "verify.json").read_text())["findings"]
    lines = (output / "completions.jsonl").read_text().splitlines()
    counts = {
        status: sum(finding["status"] == status for finding in findings)
        for status in ("holds", "differs", "not checked")
    }
    return {
        "before": measured[0],
        "after": measured[-1],
        "steps": [{name: row[name] for name in kept if name in row} for row in steps],
        "verify": {"code": values["verify_code"], "seconds": values["verify_seconds"], **counts},
        "verified_steps": sorted({finding["step"] for finding in findings if finding.get("step")}),
        "seconds": values["seconds"],
        "episodes": len(lines) + len(measured) * HELD_OUT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only what all runs begin with")
    parser.add_argument("--folder", type=Path, default=ROOT / "comparisons" / "repair")
    parser.add_argument("--agents", type=Path, help="a virtual environment with mini-swe-agent")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "prepared.json").exists():
        prepare(args.folder, args.agents)
    for seed in args.seeds:
        if not (args.folder / f"repaired-{seed}.json").exists():
            measure(args.folder, seed)
    if not args.seeds:
        return
    report = {
        "commands": [*INSTALL, *PREPARE, TRAIN.format(seed=0), VERIFY.format(seed=0)],
        "prepare_seconds": json.loads((args.folder / "prepared.json").read_text()),
        "seeds": {str(seed): read_run(args.folder, seed) for seed in args.seeds},
        "versions": {name: version(name) for name in ("policygrad", "torch", "transformers")}
        | {"mini-swe-agent": "2.4.6"},
    }
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
