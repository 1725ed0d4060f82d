"""Scripts for TRL with our trainers: what a trainer is given, what it logs and saves, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from policygrad.errors import NumericsError
from policygrad.models.loading import resolve_model
from policygrad.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from policygrad.trl.data import RepeatedOrder, make_loader
from policygrad.trl.fields import load_table

SUMS = [f"{a}+{b}=" for a in range(3) for b in range(4)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> str:
    """The embedded model, which has a chat template."""
    return str(resolve_model("tiny"))


def count_letters(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(len(text)) for text in texts]


def make_trainer(folder: Path, model: Any, kind: str = "GRPO", /, rewards: Any = count_letters, **options: Any) -> Any:
    config, trainer = {"GRPO": (GRPOConfig, GRPOTrainer), "RLOO": (RLOOConfig, RLOOTrainer)}[kind]
    own = {f.name for f in fields(config)}
    usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-3}
    usual |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 3, "save_strategy": "no"}
    arguments = {name: value for name, value in options.items() if name not in own}
    arguments.setdefault("train_dataset", Dataset.from_dict({"prompt": SUMS}))
    args = config(str(folder), **(usual | {name: value for name, value in options.items() if name in own}))
    return trainer(model, rewards, args, **arguments)


def read_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


# Fields


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_the_table_says_of_every_field_what_it_does(config: type) -> None:
    table = load_table()
    honoured = " ".join(table["honoured"].values()).split()
    listed = [*honoured, *table["refused"], *table["idle"]]
    assert len(listed) == len(set(listed))
    assert {f.name for f in fields(config) if f.init} <= set(listed)
    every = {f.name for kind in (GRPOConfig, RLOOConfig) for f in fields(kind)}
    assert set(listed) <= every


def test_refused_fields_are_all_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    options = {"push_to_hub": True, "neftune_noise_alpha": 5.0, "vllm_tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="not supported here") as error:
        make_trainer(tmp_path, "no/such-model", **options)
    assert all(f"{name}={value!r}" in str(error.value) for name, value in options.items())


def test_fields_without_effect_are_said_in_one_note(tmp_path: Path, tiny: str) -> None:
    with pytest.warns(UserWarning, match="without effect here: .*use_liger_kernel.*pad_to_multiple_of"):
        make_trainer(tmp_path, tiny, pad_to_multiple_of=8, use_liger_kernel=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "can not be both configured"),
        ({"num_generations": 3}, "must be divisible by num_generations"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"loss_type": "grop", "scale_rewards": "std"}, "loss_type='grop' must be one of .*; scale_rewards='std'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"reward_weights": [1.0, 2.0]}, "must match number of reward functions"),
        ({"train_dataset": Dataset.from_dict({"prompt": []})}, "has 0 rows"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"beta": 0.0, "sync_ref_model": True}, "no reference to move"),
        ({"delta": 0.5}, "delta=0.5"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_reason(
    options: dict[str, Any], message: str, tmp_path: Path, tiny: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tiny, **options)


def test_private_attributes_say_what_there_is_in_public(tmp_path: Path, tiny: str) -> None:
    trainer = make_trainer(tmp_path, tiny)
    with pytest.raises(AttributeError, match=r"no attribute '_metrics'.*state\.log_history"):
        trainer._metrics  # noqa: B018
    with pytest.raises(NotImplementedError, match="hf upload"):
        trainer.push_to_hub()


# Data


def test_each_prompt_is_repeated_and_the_chunk_over_again() -> None:
    order = RepeatedOrder(5, samples=2, prompts=2, repeats=2, shuffle=False, seed=0)
    assert list(order) == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert len(order) == 16
    shuffled = RepeatedOrder(5, samples=1, prompts=5, shuffle=True, seed=7)
    first, second = list(shuffled), list(shuffled)
    assert sorted(first) == sorted(second) == list(range(5))
    assert first == torch.randperm(5, generator=torch.Generator().manual_seed(7)).tolist() != second


def test_a_stream_is_repeated_alike() -> None:
    rows = [{"prompt": str(i)} for i in range(5)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    options: dict[str, Any] = {"batch_size": 4, "samples": 2, "prompts": 2, "repeats": 2, "shuffle": False, "seed": 0}
    assert list(make_loader(stream, **options)) == list(make_loader(Dataset.from_list(rows), **options))


def test_a_stream_is_trained_on(tmp_path: Path, tiny: str) -> None:
    rows = [{"prompt": prompt} for prompt in SUMS]
    trainer = make_trainer(tmp_path, tiny, train_dataset=IterableDataset.from_generator(lambda: iter(rows)))
    assert trainer.train().global_step == 3
    assert trainer.args.accelerator_config.dispatch_batches is False


# Training


def test_a_run_logs_what_trl_logs_and_leaves_a_folder_that_report_reads(tmp_path: Path, tiny: str) -> None:
    trainer = make_trainer(
        tmp_path, tiny, logging_steps=1, max_steps=4, num_iterations=2, beta=0.1, log_completions=True
    )
    before = read_weights(trainer)
    trainer.train()
    assert all(not torch.equal(before[name], p) for name, p in read_weights(trainer).items())
    first, last = trainer.state.log_history[0], trainer.state.log_history[-1]
    expected = (
        "loss grad_norm learning_rate num_tokens reward reward_std frac_reward_zero_std kl entropy step_time epoch"
    )
    expected += (
        " completions/mean_length completions/clipped_ratio completions/mean_terminated_length clip_ratio/region_mean"
    )
    assert set(expected.split()) <= first.keys()
    assert first["rewards/count_letters/mean"] == pytest.approx(first["reward"])
    assert last["train_loss"] is not None
    assert len(list((tmp_path / "completions").glob("*.parquet"))) == 2  # one per generation
    metrics = [json.loads(line) for line in (tmp_path / "policygrad" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    from policygrad.report.data import read_run

    assert len(read_run(tmp_path / "policygrad").metrics["reward"]) == 2


def test_reward_functions_of_every_kind_are_given_what_trl_gives(tmp_path: Path, tiny: str) -> None:
    seen: dict[str, Any] = {}

    def keep(
        prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[int], **more: Any
    ) -> Any:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, more=sorted(more))
        more["log_metric"]("share", 0.25)
        return [float(len(ids)) for ids in completion_ids]

    async def half(completions: list[Any], **_: Any) -> list[float | None]:
        return [0.5, None] * (len(completions) // 2)

    class Weigh:
        def __call__(self, completions: list[Any], **_: Any) -> list[float]:
            return [1.0] * len(completions)

    messages = [[{"role": "user", "content": prompt}] for prompt in SUMS]
    data = Dataset.from_dict({"prompt": messages, "answer": range(len(SUMS))})
    rewards = [keep, half, Weigh()]
    trainer = make_trainer(
        tmp_path,
        tiny,
        rewards=rewards,
        train_dataset=data,
        reward_weights=[0.5, 2.0, 1.0],
        logging_steps=1,
        max_steps=1,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert seen["completions"][0][0]["role"] == "assistant"
    assert len(set(seen["answer"])) == 1
    assert seen["more"] == ["log_extra", "log_metric", "trainer_state"]
    assert trainer.reward_func_names == ["keep", "half", "Weigh"]
    assert log["share"] == 0.25
    lengths = [0.5 * len(ids) for ids in seen["ids"]]
    totals = [length + 1 + 1 if i % 2 == 0 else length + 1 for i, length in enumerate(lengths)]
    assert log["reward"] == pytest.approx(sum(totals) / len(totals))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(kind: str, tmp_path: Path, tiny: str) -> None:
    options = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "beta": 0.05,
        "gradient_accumulation_steps": 2,
    }
    whole = make_trainer(tmp_path / "a", tiny, kind, **options)
    whole.train()
    resumed = make_trainer(tmp_path / "a", tiny, kind, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected = read_weights(whole)
    assert all(torch.equal(expected[name], p) for name, p in read_weights(resumed).items())
    last = get_last_checkpoint(str(tmp_path / "a"))
    loaded = AutoModelForCausalLM.from_pretrained(last)
    assert torch.equal(loaded.get_input_embeddings().weight, whole.model.get_input_embeddings().weight)


def test_callbacks_see_every_optimizer_step_and_may_end_the_run(tmp_path: Path, tiny: str) -> None:
    steps = list[int]()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)
            control.should_training_stop = state.global_step == 2

    trainer = make_trainer(tmp_path, tiny, callbacks=[Stop()], steps_per_generation=3, max_steps=9)
    assert trainer.train().global_step == 2
    assert steps == [1, 2]


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(tmp_path: Path, tiny: str) -> None:
    trainer = make_trainer(tmp_path, tiny, rewards=lambda completions, **_: [0.0, 1.0, 0.0, 1.0])
    before = read_weights(trainer)

    class Spoil(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            next(trainer.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)

    trainer.add_callback(Spoil())
    with pytest.raises(NumericsError, match="norm is nan at optimizer step 1: the weights are unchanged"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in read_weights(trainer).items())


def test_an_evaluation_scores_each_prompt_of_each_set(tmp_path: Path, tiny: str) -> None:
    held_out = Dataset.from_dict({"prompt": ["1+1=", "2+2="]})
    trainer = make_trainer(tmp_path, tiny, num_generations_eval=2, per_device_eval_batch_size=4, eval_dataset=held_out)
    before = read_weights(trainer)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == again["eval_loss"]
    assert first["eval_reward"] == again["eval_reward"]
    assert "eval_a_loss" in trainer.evaluate({"a": held_out})
    assert all(torch.equal(before[name], p) for name, p in read_weights(trainer).items())


def test_new_adapters_are_all_that_is_trained(tmp_path: Path, tiny: str) -> None:
    from peft import LoraConfig

    trainer = make_trainer(tmp_path, tiny, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), beta=0.1)
    before = read_weights(trainer)
    trainer.train()
    changed = {name for name, p in read_weights(trainer).items() if not torch.equal(before[name], p)}
    assert changed
    assert all("lora" in name for name in changed)
    assert trainer.ref_model is None


def test_a_models_own_generate_samples_in_the_samplers_place(tmp_path: Path, tiny: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    calls = list[int]()

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        calls.append(len(input_ids))
        texts = [[5, 6, tokenizer.eos_token_id], [7, 8, 9]] * (len(input_ids) // 2)
        return torch.cat([input_ids, torch.tensor(texts)], 1)

    model.generate = generate
    trainer = make_trainer(tmp_path, model, processing_class=tokenizer, logging_steps=1)
    trainer.train()
    assert calls == [4, 4, 4]
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0.5


def test_a_rollout_func_samples_by_itself_and_marks_what_others_wrote(tmp_path: Path, tiny: str) -> None:
    scored = list[Any]()

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[5, 6, 7, 8]] * len(prompts)
        logps, mask = [[-1.0] * 4] * len(prompts), [[1, 0, 0, 1]] * len(prompts)
        return {
            "prompt_ids": [[3, 4]] * len(prompts),
            "completion_ids": ids,
            "logprobs": logps,
            "env_mask": mask,
            "won": list(range(len(prompts))),
        }

    def reward(won: list[int], **_: Any) -> list[float]:
        scored.append(won)
        return [float(x) for x in won]

    trainer = make_trainer(tmp_path, tiny, rewards=reward, rollout_func=roll_out, logging_steps=1, max_steps=1)
    trainer.train()
    assert scored == [[0, 1, 2, 3]]
    assert trainer.state.log_history[0]["completions/mean_length"] == 2  # those of the policy
    with pytest.raises(ValueError, match="rollout_func must return keys"):
        make_trainer(tmp_path, tiny, rollout_func=lambda prompts, trainer: {"prompt_ids": []}).train()


# Tools and environments


def write_calls(model: Any, tokenizer: Any, texts: list[str], last: str) -> Callable[..., torch.Tensor]:
    """Return a `generate` that writes these texts for the rows of a first turn, and `last` in every later one."""

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        chosen = texts if len(input_ids) == len(texts) else [last] * len(input_ids)
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in chosen]
        width = max(map(len, ids))
        padded = [[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in ids]
        return torch.cat([input_ids, torch.tensor(padded)], 1)

    return generate


CALL = '<tool_call>\n{"name": "%s", "arguments": {"step": %d}}\n</tool_call>'


class Counter:
    """An environment with a reward of its own."""

    def reset(self, **_: Any) -> str:
        self.count = 0
        return " Count."

    def increment(self, step: int) -> int:
        """
        Add to the count.

        Args:
            step: What is added.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def test_an_environments_methods_are_called_and_its_reward_counts(tmp_path: Path, tiny: str) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        AutoTokenizer.from_pretrained(tiny),
    )
    trainer = make_trainer(
        tmp_path,
        model,
        rewards=None,
        processing_class=tokenizer,
        environment_factory=Counter,
        train_dataset=None,
        max_completion_length=200,
        logging_steps=1,
        max_steps=1,
    )
    assert [tool.__name__ for tool in trainer.tools] == ["increment"]
    assert trainer.reward_func_names == ["Counter"]
    texts = [CALL % ("increment", 2), CALL % ("decrement", 1), "No.", CALL % ("increment", 5)]
    trainer.model.generate = write_calls(model, tokenizer, texts, "Done.")
    trainer.train()
    log = trainer.state.log_history[0]
    assert [environment.count for environment in trainer.environments] == [2, 0, 0, 5]
    assert log["rewards/Counter/mean"] == pytest.approx(7 / 4)
    assert log["tools/call_frequency"] == pytest.approx(3 / 4)
    assert log["tools/failure_frequency"] == pytest.approx(1 / 3)


def test_rows_choose_among_named_environments(tmp_path: Path, tiny: str) -> None:
    class Quiet:
        def reset(self, **_: Any) -> None:
            return None

    data = Dataset.from_dict({"environment": ["count", "quiet"], "prompt": [[{"role": "user", "content": "Go."}]] * 2})
    options = {"environment_factory": {"count": Counter, "quiet": Quiet}, "max_steps": 2, "max_completion_length": 4}
    trainer = make_trainer(tmp_path, tiny, train_dataset=data, shuffle_dataset=False, **options)
    trainer.train()
    assert [type(environment) for environment in trainer.environments] == [Quiet] * 4
    assert trainer.reward_weights.tolist() == [1.0, 1.0]
    unknown = Dataset.from_dict({"environment": ["chess"], "prompt": [[{"role": "user", "content": "Go."}]]})
    with pytest.raises(ValueError, match="not among the environments"):
        make_trainer(tmp_path, tiny, train_dataset=unknown, **options).train()
