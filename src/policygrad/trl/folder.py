"""The run's folder beside the checkpoints: its configuration, metrics and completions, as `policygrad report` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, merge
from policygrad.trackers.jsonl import JsonlTracker
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import dump_config
from policygrad.training.run_folder import with_end_marker
from policygrad.trl.sampling import SampledRows
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.message_parts import to_plain

NAME = "policygrad"
"""Name of the folder in output_dir."""
_MEASURED = (
    "objective",
    "kl",
    "kl_old",
    "entropy/exact",
    "ratio/max",
    "clip_ratio/low",
    "clip_ratio/high",
    "observation/nll",
)


class RunLog:
    """Writes a row of metrics for each generation, after its updates, and a row for each completion.

    Args:
        output: The trainer's output_dir.
        step: Generations that the files keep, of a run that is resumed; 0 = a new run.
    """

    def __init__(self, output: Path, run: Run, step: int = 0) -> None:
        self.folder = output / NAME
        self.files = JsonlTracker(self.folder)
        self.files.truncate_after(step if step else -1)
        self.step, self._open = step, dict[str, Any]()
        self._updates = list[Metrics]()
        write_atomically(self.folder / "run.toml", with_end_marker(dump_config(run.without_objects())))

    def begin(
        self, sampled: SampledRows, batch: Batch, psi: Tensor, scores: Mapping[str, float], samples: int, seconds: float
    ) -> None:
        """Note a generation. What was measured of the one before is written now."""
        self.end()
        self.step += 1
        lengths = batch.tokens.new_tensor([len(ids) for ids in sampled.completion_ids]).float()  # type: ignore[union-attr]
        truncated = [] if batch.truncated is None else batch.truncated.tolist()
        values = {
            **{name: scores[name] for name in ("reward", "reward_std", "frac_reward_zero_std")},
            "completions/mean_length": float(lengths.mean()),
            "completions/max_length": float(lengths.max()),
            "completions/truncated_ratio": sum(truncated) / max(1, len(truncated)),
            "tokens/sampled": float(lengths.sum()),
            "time/rollout": seconds,
            "time/update": 0.0,
        }
        rows = [
            {
                "prompt": to_plain(_without_images(sampled.prompts[i])),
                "completion": _as_text(sampled.completions[i]),
                "reward": float(batch.reward[i]),
                "advantage": float(psi[i].max() if psi[i].max() > 0 else psi[i].min()) if psi.shape[1] else 0.0,
                "tokens": int(lengths[i]),
                "truncated": bool(truncated[i]) if truncated else False,
                "group": i // samples,
            }
            for i in range(len(sampled.rows))
        ]
        self._open = {"values": values, "rows": rows}

    def add_update(self, metrics: Metrics, seconds: float, **values: float) -> None:
        """Note what an update has measured."""
        if self._open:
            self._updates.append(metrics)
            self._open["values"] |= values
            self._open["values"]["time/update"] += seconds

    def end(self) -> None:
        """Write the generation that is open, if one is."""
        if not self._open:
            return
        values, rows = self._open["values"], self._open["rows"]
        merged = merge(*self._updates)
        values |= {name: float(merged[name].value) for name in _MEASURED if name in merged}
        elapsed = values["time/rollout"] + values["time/update"]
        values["tokens_per_second"] = values["tokens/sampled"] / elapsed if elapsed else 0.0
        self.files.log(self.step, values, rows)
        self._open, self._updates = {}, []


def _without_images(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [{**message, "content": _as_text([message])} for message in prompt]


def _as_text(completion: Any) -> str:
    """Return what messages say, without their pictures."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") or "" for message in completion]
    texts = [
        content if isinstance(content, str) else "".join(part.get("text") or "[image]" for part in content)
        for content in contents
    ]
    return "\n".join(texts)
