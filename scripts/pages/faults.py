"""The measurements in docs/reliability.md: what scripts/count_faults.py and scripts/soak.py have left."""

from __future__ import annotations

from pages.markdown import block, table
from pages.reports import Data

COUNTED = {
    "kills": ("SIGKILL before and after each call of a save", "the checkpoint before, or this one, whole"),
    "errors": ("a disk error at each call of a save", "the same, and one error that says what is left"),
    "flips": ("one bit of a checkpoint turned", "named, and not loaded"),
    "supervised": (
        "SIGKILL of `sft` and `reward-model`",
        "weights, optimiser, metrics and files of a run never killed",
    ),
}
"""fault and promise of each kind, as in tests/faults.toml."""


def counted_section(found: Data | None) -> str:
    """How often each fault was made, and what did not hold."""
    head = "## Counted\n\nOn checkpoints of PPO's run of the embedded model, and on whole runs:"
    command = block("python scripts/count_faults.py", "sh")
    if found is None:
        return f"{head}\n\n{command}\n\nIts figures have not been taken yet; they will stand here."
    rows = []
    for kind, (fault, promise) in COUNTED.items():
        if seen := found.get(kind):
            told = seen.get("kinds") or [f"{name} {count}" for name, count in seen.get("phases", {}).items()]
            more = f" ({', '.join(told)})" if told else ""
            rows.append((fault + more, promise, str(seen["count"]), str(len(seen["wrong"]))))
    wrong = [f"- **It does not hold:** {text}." for kind in COUNTED for text in found.get(kind, {}).get("wrong", ())]
    lines = [head, command, table(("fault", "promise", "times", "did not hold"), rows)]
    commands = dict.fromkeys(f"`{seen['made_by']}` ({seen['machine']})" for seen in found.values())
    said = f"By {', '.join(commands)}. Kills of `policygrad train` are the soak's, below."
    return "\n\n".join([*lines, *(["\n".join(wrong)] if wrong else []), said])


def soak_section(found: Data | None, shorter: Data | None = None) -> str:
    """What the soak has seen. shorter: another one, of fewer steps, which is told below the first."""
    command = block("python scripts/soak.py", "sh")
    head = (
        "## The soak\n\nOne run that is never killed and is watched, the same again with SIGKILL at random moments of every phase,"
        " and a comparison of what they leave, bit for bit:"
    )
    command += (
        "\n\nIn parts: with `--minutes 50` it ends with exit code 75 as long as there is more to do, and the same command goes on, "
        "with the same code only. With `--only watched` and `--only killed` in two terminals both runs go on at once, and the "
        "command without it compares them."
    )
    if found is None:
        return f"{head}\n\n{command}\n\nIts figures have not been taken yet; they will stand here."
    more = []
    if shorter is not None:
        again = f"python scripts/soak.py --steps {shorter['steps']} --watch {shorter['looks_every']}"
        more = ["And a shorter one:", block(again, "sh"), *_told(shorter)]
    return "\n\n".join([head, command, *_told(found), *_held(found), *more])


def _told(found: Data) -> list[str]:
    """How long the runs were, what the kills fell into, and what they left."""
    said = [
        f"{found['steps']:,} steps of `{found['command']}` (torch {found['versions']['torch']}; {found['machine']})."
    ]
    if "kills" in found:
        phases = ", ".join(f"{name} {count}" for name, count in found["phases"].items())
        said.append(
            f"{found['kills']} kills ({phases}); the last process that a killed run had started was gone after "
            f"{found['slowest_to_be_gone']:.2f} s."
        )
    wrong = [f"- **It does not hold:** {text}." for text in found["broken"]]
    said.append(
        "\n".join(wrong) or "Weights, optimiser, metrics, completions and files were those of the run never killed."
    )
    return [*said, *([found["remarks"]] if found.get("remarks") else [])]


def _held(found: Data) -> list[str]:
    """What the run never killed held, from its first to its last fifth."""
    names = {"trainer_mib": "trainer, resident [MiB]", "workers_mib": "reward workers, resident [MiB]"}
    rows = [
        (
            names.get(name, name),
            *(f"{seen[key]:.1f}".removesuffix(".0") for key in ("first", "last", "least", "largest")),
            f"{100 * seen['apart']:.2f}",
        )
        for name, seen in found.get("held", {}).items()
    ]
    few = "" if found.get("judged") else "; these looks are too few for a judgement"
    told = (
        "Medians of the first and the last fifth of the run never killed, after a tenth of warm-up, extremes, and how far the "
        f"medians of its fifths are apart{few}:"
    )
    columns = ("", "at first", "at last", "least", "largest", "apart [%]")
    return [told, table(columns, rows)] if rows else []
