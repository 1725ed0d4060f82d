"""What is done with every extra, as a user would: a command that is refused without it, and works with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from policygrad.errors import install_command

SUMS = "".join(
    json.dumps({"prompt": f"{a} + {b} =\n", "answer": str(a + b)}) + "\n" for a in range(8) for b in range(8)
)
SHORT = (
    "--steps",
    "2",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "4",
    "--evaluation.problems",
    "0",
    "--plain",
)
TRAIN = ("-m", "policygrad", "train", "grpo", *SHORT, "--max-tokens", "12", "--output", "run")
URL = "{url}"
"""Stands for the address of the server that is asked."""


@dataclass(frozen=True)
class Case:
    """One feature of an extra."""

    extra: str
    shows: str
    """In words, for the table."""
    words: tuple[str, ...]
    """Of the Python of an environment, in an empty folder."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What is in the folder."""
    before: str = ""
    """Python that makes more, which needs the extra too."""
    server: str = ""
    """A script beside this one that answers meanwhile, run by the environment that is tried."""
    leaves: tuple[str, ...] = ()
    """Files that are there afterwards, as patterns."""
    after: str = ""
    """Python that reads what was made, and fails where it is not right."""
    refusal: str = ""
    """What the refusal without the extra has to say; empty = what installs the extra."""
    code: int = 2
    """The exit code of that refusal."""

    @property
    def named(self) -> str:
        return self.refusal or install_command(self.extra)


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Words"]


class Data(vf.TaskData):
    answer: str


class Spell(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class Words(vf.Taskset[Spell, vf.TasksetConfig]):
    def load(self):
        for word in ("one", "two", "three", "four") * 10:
            yield Spell(Data(prompt=f"Say {word}", answer=word), self.config.task)
"""
TABLES = """
import datasets, pyarrow as pa, pyarrow.parquet
rows = [{"prompt": f"{a} + {b} =\\n", "answer": str(a + b)} for a in range(8) for b in range(8)]
pyarrow.parquet.write_table(pa.Table.from_pylist(rows), "rows.parquet")
datasets.Dataset.from_list(rows).save_to_disk("saved")
"""
BOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator("run/tensorboard")
board.Reload()
assert [e.step for e in board.Scalars("reward")] == [1, 2]
"""
MLFLOW = """
import json, mlflow
known = json.load(open("run/tracked.json"))["mlflow"]
assert [m.step for m in mlflow.MlflowClient().get_metric_history(known, "reward")] == [1, 2]
"""
TRACKIO = """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("policygrad")
assert [row["step"] for row in SQLiteStorage.get_logs("policygrad", name) if "reward" in row] == [1, 2]
"""
RIGHT = """
from policygrad.rewards import resolve
said = resolve("math").function(["?"] * 2, ["The answer is $\\\\frac{2}{4}$.", "The answer is $0.6$."], answer=["0.5", "0.5"])
assert said == [1.0, 0.0], said
"""


def tracked(name: str, leaves: tuple[str, ...], after: str = "") -> Case:
    """A run that a service follows."""
    return Case(name, f"`train --track {name}`", (*TRAIN, "--track", name), leaves=leaves, after=after)


CASES = (
    Case(
        "math",
        "`train --reward math`, and a fraction graded",
        (*TRAIN, "--task", "sums.jsonl", "--reward", "math"),
        files={"sums.jsonl": SUMS},
        after=RIGHT,
    ),
    Case(
        "lora",
        "`train --learner.lora`",
        (*TRAIN, "--learner.lora", "rank=4"),
        leaves=("run/model/adapter_model.safetensors",),
    ),
    Case(
        "qlora",
        "`train --learner.lora rank=4,bits=4`, on the CPU",
        (*TRAIN, "--learner.lora", "rank=4,bits=4"),
        leaves=("run/model/adapter_model.safetensors",),
    ),
    Case(
        "control",
        "`lab control`",
        ("-m", "policygrad", "lab", "control", "--steps", "2000", "--episodes", "2", "--output", "found.json"),
        leaves=("found.json",),
    ),
    Case("control", "`train --environment gymnasium:…`", (*TRAIN, "--environment", "gymnasium:FrozenLake-v1")),
    Case(
        "openenv",
        "`train --environment openenv:…`, a server that stands in for one",
        (*TRAIN, "--environment", f"openenv:{URL}"),
        server="openenv_stand_in.py",
    ),
    Case("textarena", "`train --environment textarena:…`", (*TRAIN, "--environment", "textarena:GuessTheNumber-v0")),
    Case(
        "verifiers",
        "`train --task verifiers:… --environment verifiers:…`",
        (*TRAIN, "--task", "verifiers:words", "--environment", "verifiers:words"),
        files={"words.py": TASKSET},
    ),
    Case(
        "data",
        "`train --task` of a Parquet file",
        (*TRAIN, "--task", "rows.parquet", "--reward", "exact_match"),
        before=TABLES,
    ),
    Case(
        "data",
        "of a folder of `datasets`",
        (*TRAIN, "--task", "saved", "--reward", "exact_match"),
        files={"saved/dataset_info.json": "{}"},
        before=TABLES,
    ),
    Case(
        "engines",
        "`train --sampler.engine vllm`, a server that stands in for one",
        (*TRAIN, "--sampler.engine", "vllm", "--sampler.urls", URL, "--sampler.max-concurrency", "4"),
        server="vllm_stand_in.py",
    ),
    Case(
        "judge",
        "`train --reward judge:…`, a server that stands in for a model's",
        (*TRAIN, "--task", "sums.jsonl", "--reward", f"judge:good.md,model=m,url={URL}/v1,scale=0..1,cache=judged"),
        files={"sums.jsonl": SUMS, "good.md": "Good is what is right.\n"},
        server="judge_stand_in.py",
        leaves=("judged/judged.sqlite",),
    ),
    Case(
        "llama-cpp",
        "`train --sampler.engine llama_cpp`, its own server",
        (*TRAIN, "--sampler.engine", "llama_cpp"),
        leaves=("run/model/config.json",),
    ),
    Case(
        "llama-cpp",
        "`export --format gguf`",
        ("-m", "policygrad", "export", "tiny", "--format", "gguf", "--output", "model.gguf"),
        leaves=("model.gguf",),
    ),
    tracked("wandb", ("run/wandb/offline-run-*/*.wandb",)),
    tracked("tensorboard", ("run/tensorboard/events*",), BOARD),
    tracked("trackio", (), TRACKIO),
    tracked("mlflow", ("run/tracked.json",), MLFLOW),
    Case(
        "ray",
        "`train --cluster local`",
        (*TRAIN, "--cluster", "local"),
        leaves=("run/model/model.safetensors",),
    ),
    Case(
        "docs",
        "`make site`",
        ("{root}/scripts/make_site.py", "site"),
        leaves=("site/index.html",),
        refusal="pip install -e '.[docs]'",
        code=1,
    ),
)
