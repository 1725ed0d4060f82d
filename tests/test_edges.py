"""Small things at the edges that an audit found: each was once a traceback, a dead end or an untrue word."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from policygrad.checkpoint import disk, model_folder
from policygrad.checkpoint import format as checkpoint
from policygrad.commands.train import flags
from policygrad.errors import ConfigError, ModelError, RunError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rewards import RewardPool
from policygrad.rewards.calls import to_number
from policygrad.tasks import load_task
from policygrad.trackers import Tracker
from policygrad.training.config.parts import part_class


class Notes(Tracker):
    """Remembers what was noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def huge(prompts, completions, **columns):
    return [1e39]


def large(prompts, completions, **columns):
    return [9e17]


def test_a_finite_reward_that_float32_statistics_cannot_hold_counts_as_infinite():
    assert to_number(1e39) == (None, "inf")
    assert to_number(-1e19) == (None, "inf")
    assert to_number(1e17) == (1e17, None)
    # the largest that is let through gives finite advantages, also with the other extreme beside it
    group = pg.Batch(
        mask=torch.ones(4, 1, dtype=torch.bool),
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.tensor([1e18, 1e18, -1e18, 0.0]),
    )
    assert pg.GRPO.advantages(group).isfinite().all()
    with RewardPool([huge], workers=1) as pool:
        scores = pool.score(["p"], ["c"], {})
    assert scores.total == [None]
    assert scores.failures == {"inf": 1}
    assert "1e+39, beyond ±1e+18" in scores.messages[0]


def test_a_weighted_sum_beyond_the_largest_reward_is_a_failure_with_a_reason():
    rewards = [pg_reward("one"), pg_reward("two")]
    with RewardPool(rewards, workers=1) as pool:
        scores = pool.score(["p"], ["c"], {})
    assert scores.total == [None]
    assert scores.failures == {"inf": 1}
    assert "weighted sum" in scores.messages[0]


def pg_reward(name: str):
    from policygrad.rewards import Reward

    return Reward(name, large)


def test_names_given_where_objects_belong_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"pg\.algorithm\('dapo'\)"):
        pg.Run(algorithm="dapo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reward=\('math',\)"):
        pg.Run(reward="math")  # type: ignore[arg-type]


def test_a_part_of_ones_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "gates_of_mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Open:\n    width: float = 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert part_class("gates_of_mine:Open", "command line", "algorithm.gate").__name__ == "Open"
    with pytest.raises(ConfigError, match="move the class to a module of its own"):
        part_class("__main__:Nowhere", "run.toml", "algorithm.gate")


def test_completion_offers_options_that_exist_and_nothing_else():
    offered = flags("grpo")
    assert "--steps" in offered
    assert "--algorithm.gate.low" in offered
    assert all(flag[2].isalpha() and flag[-1].isalnum() for flag in offered)
    assert "--algorithm" not in offered  # from the help text's `--algorithm.FIELD`


def test_an_unknown_task_is_told_in_sentences():
    with pytest.raises(ValueError, match=r"lists the names\. A file"):
        load_task("qqqqqqqq")


def test_a_full_disk_while_the_model_is_saved_names_the_way_to_go_on(random_model: Path, tmp_path: Path, monkeypatch):
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)

    def full(folder, *args, **kwargs):
        Path(folder).mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(RunError, match=r"model was not written: the disk is full; .*--resume"):
        model_folder.save_model(tmp_path, model, tokenizer.hf)
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(RunError, match=r"run\.toml was not written: No space left"):
        disk.write_atomically(tmp_path / "run.toml", "steps = 1")
    assert list(tmp_path.iterdir()) == []


SMALL = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}


def test_a_prompt_without_room_for_the_completion_is_refused_before_there_is_a_folder(tmp_path: Path):
    run = pg.Run(**SMALL, sampling=pg.Sampling(max_tokens=5000), output=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="2048 positions"):
        pg.train(run)
    assert not (tmp_path / "run").exists()


def test_run_toml_is_the_first_file_of_a_run_so_that_a_killed_one_can_be_resumed(tmp_path: Path, monkeypatch):
    from policygrad.training import lifecycle

    def killed(folder: Path):
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle, "JsonlTracker", killed)
    with pytest.raises(KeyboardInterrupt):
        pg.train(pg.Run(**SMALL, evaluation=pg.Evaluation(problems=0), output=str(tmp_path / "run")))
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.toml"]
    assert pg.train(resume=tmp_path / "run").steps == 1


def test_held_out_completions_without_a_reward_are_said_to_count_as_zero(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 ="}\n{"prompt": "1 + 2 ="}\n')
    source = tmp_path / "mine.py"
    source.write_text("def no_idea(prompts, completions, **columns):\n    return [None]\n")
    display = Notes()
    run = pg.Run(
        **SMALL,
        task=str(rows),
        reward=(f"{source}:no_idea",),
        evaluation=pg.Evaluation(problems=2, samples=2),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=display)
    assert "4 of 4 held-out completions have no reward and count as 0" in display.said


def test_the_global_random_state_belongs_to_the_seed(tmp_path: Path):
    states = []
    for name in ("a", "b"):
        torch.manual_seed(len(name) + len(states))
        pg.train(pg.Run(**SMALL, evaluation=pg.Evaluation(problems=0), output=str(tmp_path / name)))
        states.append(torch.get_rng_state())
        shutil.rmtree(tmp_path / name)
    assert torch.equal(*states)


def copied(model: Path, folder: Path, **entries: dict[str, object]) -> Path:
    """A copy of the model with other entries in its JSON files; None takes an entry out."""
    shutil.copytree(model, folder)
    for name, changes in entries.items():
        path = folder / f"{name}.json"
        known = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in (known | changes).items() if v is not None}))
    return folder


def test_a_chat_template_that_raises_is_refused_with_the_line(random_model: Path, tmp_path: Path):
    model = copied(random_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role.') }}{% endif %}{{ messages[0].nobody.x }}"
    )
    tokenizer = load_tokenizer(str(model), load_model(str(model)))
    system = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    with pytest.raises(
        ModelError, match=r"rows\.jsonl:7: the chat template of .* \(roles: system, user\): no system role\. C"
    ):
        tokenizer.encode(system, 4, "rows.jsonl:7")
    with pytest.raises(ModelError, match=r"rows\.jsonl:8: .* Change the messages, or give the prompt as a string"):
        tokenizer.encode(system[1:], 4, "rows.jsonl:8")


def test_an_end_token_that_only_the_architecture_names_is_no_end_token(random_model: Path, tmp_path: Path):
    """A Llama's default is id 2, whatever token that is in this vocabulary."""
    ends = {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}
    silent = copied(random_model, tmp_path / "silent", **ends, tokenizer_config={"eos_token": None})
    network = load_model(str(silent))
    assert network.config.eos_token_id == 2
    with pytest.raises(ModelError, match="neither the tokenizer nor a configuration file of"):
        load_tokenizer(str(silent), network)
    tokenizer = copied(random_model, tmp_path / "tokenizer", **ends)
    assert load_tokenizer(str(tokenizer), load_model(str(tokenizer))).end == {1}
    file = copied(
        random_model, tmp_path / "file", config={"eos_token_id": None}, generation_config={"eos_token_id": [1, 5]}
    )
    assert load_tokenizer(str(file), load_model(str(file))).end == {1, 5}


def test_what_a_model_or_a_tokenizer_lacks_is_named(random_model: Path, tmp_path: Path):
    model = copied(random_model, tmp_path / "model")
    network = load_model(str(model))
    for path in [*model.glob("token*"), *model.glob("*.jinja")]:
        path.unlink()
    with pytest.raises(ModelError, match=r"the tokenizer of .*, whose folder needs tokenizer\.json and tok") as caught:
        load_tokenizer(str(model), network)
    assert "config.json and safetensors" not in str(caught.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ModelError, match=r"the model .*, whose folder needs config\.json and safetensors: \w"
    ) as caught:
        load_model(str(empty))
    assert ".." not in str(caught.value).replace(str(empty), "")
    assert not str(caught.value).endswith(".")


def test_a_model_is_on_the_disk_before_the_old_one_goes(random_model: Path, tmp_path: Path, monkeypatch):
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    final = model_folder.save_model(tmp_path, model, tokenizer.hf)
    (final / "mark").write_text("old")
    synced: list[str] = []
    real_sync, real_replace = model_folder.sync, disk.os.replace
    monkeypatch.setattr(model_folder, "sync", lambda path: (synced.append(path.name), real_sync(path))[1])

    def fails_when_installed(source, target):
        if Path(target) == final and Path(source).name == ".tmp-model":
            raise OSError(errno.EIO, "Input/output error")
        real_replace(source, target)

    monkeypatch.setattr(disk.os, "replace", fails_when_installed)
    with pytest.raises(RunError, match="Input/output error"):
        model_folder.save_model(tmp_path, model, tokenizer.hf)
    assert (final / "mark").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr(disk.os, "replace", real_replace)
    os.replace(final, tmp_path / "model.old")  # killed between the two renames
    model_folder.save_model(tmp_path, model, tokenizer.hf)
    assert not (final / "mark").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert {p.name for p in final.iterdir()} | {".tmp-model"} <= set(synced)


def mine(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"def mine(prompts, completions, **columns):\n    return {body}\n")
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "1 + 2 ="}\n')
    return f"{folder / 'mine.py'}:mine"


def test_a_completion_without_a_reward_has_its_tokens_in_the_log(tmp_path: Path):
    reward = mine(tmp_path, "[None if len(completions[0]) % 2 else 1.0]")
    run = pg.Run(
        algorithm=pg.DR_GRPO,
        task=str(tmp_path / "rows.jsonl"),
        reward=(reward,),
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=8,
        evaluation=pg.Evaluation(problems=0),
        output=str(tmp_path / "run"),
    )
    pg.train(run)
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} == {None, 1.0}
    assert all(1 <= row["tokens"] <= 32 for row in rows)
    sampled = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["tokens/sampled"]
    assert sum(row["tokens"] for row in rows) == sampled


def test_a_run_that_nothing_could_be_scored_in_says_so(tmp_path: Path):
    class Summary(Notes):
        def finish(self, summary):
            self.summary = summary

    display = Summary()
    run = pg.Run(
        **SMALL,
        task=str(tmp_path / "rows.jsonl"),
        reward=(mine(tmp_path, "[None]"),),
        evaluation=pg.Evaluation(problems=2, samples=2),
        checkpoint=pg.Checkpointing(every=1),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=display)
    assert result.before is result.after is None
    assert display.summary["held-out"].startswith("nothing could be scored, before or after")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["held_out_before"] is written["held_out_after"] is None
    assert "held_out" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    pg.train(replace(run, steps=2, reward=(mine(tmp_path, "[0.25]"),)), resume=tmp_path / "run", display=display)
    assert display.summary["held-out reward"] == "not scored -> 0.25"


def test_a_failed_checkpoint_names_the_option_that_goes_on(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run" / "checkpoints"
    checkpoint.save(folder, 1, {"w": torch.zeros(2)}, {})
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"free some space; --resume .*run goes on from there$"):
        checkpoint.save(folder, 2, {"w": torch.zeros(2)}, {})
