"""Preregistration: a comparison that is written down before any of its runs, and later carried out as written.

The file holds the plan, the metric, the rules for conclusions and for stopping, and hashes of code and data. The sha256 of its
bytes stands in the report, so that publishing the number in advance shows that nothing was chosen afterwards.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import policygrad
from policygrad.compare.plan import ComparisonPlan
from policygrad.compare.report import DECISION_RULE, METRICS, STOPPING_RULE, PreregistrationNote
from policygrad.errors import ConfigError, RunError
from policygrad.tasks.sources import digest_data
from policygrad.training.config.run import Run
from policygrad.training.config.trust import code_in_argv
from policygrad.utils.filesystem import parse_json, read_json, write_atomically

PREREGISTRATION_FILE = "preregistration.json"
"""The copy in a comparison's folder, byte for byte."""
DEVIATIONS_FILE = "deviations.json"


@dataclass(frozen=True, kw_only=True)
class Preregistration:
    """A comparison as it is meant to be carried out."""

    date: str
    """When it was written, by this machine's clock, in UTC."""
    plan: ComparisonPlan
    metric: str
    """The metric that conclusions are about: one of `METRICS`."""
    threshold: float
    code: Mapping[str, str]
    """`policygrad`, and each file or module of custom code -> sha256."""
    data: Mapping[str, str]
    """Each task, evaluation data and local model that is files -> sha256."""
    decision_rule: str = DECISION_RULE
    stopping_rule: str = STOPPING_RULE
    format: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.to_dict()}


def preregister(plan: ComparisonPlan, runs: Sequence[Run], metric: str, threshold: float) -> Preregistration:
    """Return the preregistration of a plan, with the hashes of what its rows use now. runs: one of each row."""
    data = dict[str, str]()
    for run in runs:
        for name in (run.task, run.eval_data, run.model):
            if isinstance(name, str) and (digest := digest_data(name, run.directory)) is not None:
                data[name] = digest
    code = {"policygrad": _hash_files(Path(policygrad.__file__).parent, ("*.py", "*.toml"))}
    for name in code_in_argv([word for row in plan.rows for word in row.argv]):
        path = Path(getattr(sys.modules.get(name), "__file__", None) or name)
        code[name] = _hash_files(path.parent, (path.name,)) if path.is_file() else "missing"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Preregistration(date=date, plan=plan, metric=metric, threshold=threshold, code=code, data=data)


def write_preregistration(registered: Preregistration, path: Path) -> str:
    """Write a new file and return its sha256. Raises ConfigError if it exists: a preregistration is never replaced."""
    if path.exists():
        raise ConfigError(
            f"--preregister {path}: the file exists, and a preregistration is not replaced; name another one"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--preregister {path}: there is no folder {path.parent}; create it first")
    text = json.dumps(registered.to_dict(), indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def read_preregistration(path: Path) -> Preregistration:
    """Read a file that `write_preregistration` wrote. Raises RunError for anything else."""
    try:
        data = read_json(path)
        if unknown := sorted(set(data) - {f.name for f in fields(Preregistration)}):
            raise ValueError(f"unknown key {unknown[0]!r}")
        registered = Preregistration(**data | {"plan": ComparisonPlan.from_dict(data["plan"])})
        if registered.metric not in METRICS or not 0 < registered.threshold <= 1:
            raise ValueError(f"metric {registered.metric!r} or threshold {registered.threshold!r} is out of range")
        if not all(isinstance(table, dict) for table in (registered.code, registered.data)):
            raise ValueError("code and data must be tables of hashes")
        return registered
    except OSError as error:
        raise RunError(
            f"{path} cannot be read ({error.strerror}); `policygrad compare … --preregister FILE` writes one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not a preregistration ({error}); `policygrad compare … --preregister FILE` writes one"
        ) from error


def list_deviations(registered: Preregistration, current: Preregistration) -> list[str]:
    """Return how a comparison differs from its preregistration, one line each."""
    then, now = registered.plan, current.plan
    deviations = [
        f"{name.replace('_', ' ')}: {getattr(then, name)} registered, {getattr(now, name)} now"
        for name in ("tokens", "seeds", "tuning_seeds")
        if getattr(then, name) != getattr(now, name)
    ]
    old, new = {row.label: row for row in then.rows}, {row.label: row for row in now.rows}
    deviations += [f"the row {label} is left out" for label in old if label not in new]
    deviations += [f"the row {label} is added" for label in new if label not in old]
    for label in (label for label in old if label in new and old[label] != new[label]):
        what = next(f.name for f in fields(old[label]) if getattr(old[label], f.name) != getattr(new[label], f.name))
        deviations.append(f"the row {label} differs in its {what}")
    for name in ("metric", "threshold", "decision_rule", "stopping_rule"):
        if getattr(registered, name) != getattr(current, name):
            deviations.append(
                f"{name.replace('_', ' ')}: {getattr(registered, name)} registered, {getattr(current, name)} now"
            )
    for kind in ("code", "data"):
        before, after = getattr(registered, kind), getattr(current, kind)
        deviations += [
            f"{kind}: {name} has changed" for name in {**before, **after} if before.get(name) != after.get(name)
        ]
    return deviations


def check_unstarted(folder: Path, content: bytes) -> None:
    """Raise RunError if the folder has runs that are not of this preregistration, and so may be older than it."""
    target = folder / PREREGISTRATION_FILE
    is_same = target.is_file() and target.read_bytes() == content
    if not is_same and (target.exists() or (folder / "runs").exists()):
        raise RunError(
            f"{folder} holds runs of something other than this preregistered comparison: use another folder, --output DIR"
        )


def record_deviations(folder: Path, deviations: Iterable[str]) -> tuple[str, ...]:
    """Add deviations to those that the comparison in a folder has recorded, and return all."""
    path = folder / DEVIATIONS_FILE
    before = parse_json(path.read_text(encoding="utf-8")) if path.exists() else []
    recorded = tuple(dict.fromkeys([*map(str, before), *deviations]))
    if recorded:
        write_atomically(path, json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    return recorded


def note_preregistration(folder: Path, registered: Preregistration, deviations: Sequence[str]) -> PreregistrationNote:
    """Return what a report says about the preregistration in its folder."""
    sha256 = hashlib.sha256((folder / PREREGISTRATION_FILE).read_bytes()).hexdigest()
    return PreregistrationNote(sha256=sha256, date=registered.date, deviations=tuple(deviations))


def _hash_files(folder: Path, patterns: Sequence[str]) -> str:
    """Return the sha256 over the names and contents of a folder's files."""
    result = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in folder.rglob(pattern)):
        result.update(f"{path.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return result.hexdigest()
