"""Options of other libraries and guessed names: each is answered with an option that exists, and none of ours is taken for one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from policygrad.commands.foreign_options import (
    load_foreign_options,
    load_guesses,
    look_up_option,
    reject_foreign_options,
)
from policygrad.commands.help import list_command_flags
from policygrad.commands.train import list_train_flags
from policygrad.errors import ConfigError
from policygrad.training.config.serialization import list_parts

LIBRARIES, SUPERVISED = load_foreign_options()
NAMES = [(library, name) for library, names in LIBRARIES.items() for name in names]


@pytest.fixture(scope="module")
def ours() -> set[str]:
    """Options of `train` with the parts of very different algorithms, and of parts that only --algorithm.FIELD puts in."""
    result = {
        flag
        for name in ("grpo", "ppo", "rloo", "dapo", "a2c", "sapo", "vapo", "prime_rl")
        for flag in list_train_flags(name)
    }
    fields = ("gate", "advantage", "ratio", "aggregation", "terms", "shaping", "filters", "corrections")
    result |= {f"--algorithm.{field}" for field in fields}
    result |= {"--algorithm.gate.c", *(f"--algorithm.corrections.truncated-is.{end}" for end in ("cap", "low"))}
    result |= {f"--algorithm.filters.reward-range.{end}" for end in ("low", "high")}
    result |= {f"--algorithm.filters.replay-buffer.{end}" for end in ("size", "max-age")}
    result |= {"--algorithm.corrections.off-policy-sequence-mask.delta"}
    return result | {"--algorithm.advantage.batch-std.of", "--algorithm.advantage.group-std.eps"}


def test_every_suggested_option_exists(ours: set[str]) -> None:
    for library, name in NAMES:
        answer = LIBRARIES[library][name]
        assert answer.flag or answer.note, name
        for flag in re.findall(r"--[a-z][\w.-]*[a-z]", f"{answer.flag} {answer.note}".replace("--algorithm.FIELD", "")):
            assert flag in ours, f"{library}: {name} is answered with {flag}"
        for part in re.findall(r"--algorithm\.\w+ ([A-Z]\w+)", answer.flag):
            assert part in list_parts()
    for name, answer in load_guesses().items():
        assert answer.flag or answer.note, name
        for flag in re.findall(r"--[a-z][\w.-]*[a-z]", f"{answer.flag} {answer.note}"):
            assert flag in ours | {"--algorithm.terms.entropy.eta"}, f"{name} is answered with {flag}"
    known = set(list_command_flags("sft"))
    for answer in SUPERVISED.values():
        assert set(re.findall(r"--[a-z][\w.-]*[a-z]", answer.flag)) <= known


def test_our_options_are_not_mistaken_for_foreign_ones(ours: set[str]) -> None:
    supervised = set(list_command_flags("sft"))
    for flag in ours | supervised:
        for word in (flag, f"{flag}=1", flag.replace("-", "_").replace("__", "--", 1)):
            if flag in ours:
                reject_foreign_options([word, "1"], lambda: ours)
            reject_foreign_options([word, "1"], lambda: supervised, supervised=True)
    assert not look_up_option("steps")


def test_every_foreign_option_is_refused_by_name(ours: set[str]) -> None:
    for library, name in NAMES:
        word = f"{name}=1" if library == "verl" else f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError) as refused:
            reject_foreign_options(["ppo", word, "--dry-run"], lambda: ours)
        assert library in str(refused.value)
        for flag in re.findall(r"--[a-z][\w.-]*[a-z]", LIBRARIES[library][name].flag):
            assert flag in str(refused.value)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train --num-generations 16", "--num-generations is TRL's; here it is --samples-per-prompt 16"),
        ("train --num_generations=16", "here it is --samples-per-prompt 16"),
        ("train grpo --max-completion-length 64", "here it is --max-tokens 64"),
        ("train grpo --epsilon 0.1", "--algorithm.gate.low 0.1 and --algorithm.gate.high 0.1 (two options here"),
        ("train --gamma 0.9", "here it is --algorithm.advantage.gae.gamma 0.9 and --algorithm.critic.gamma 0.9 (one γ"),
        ("train --bf16 true", "here it is --learner.dtype bf16 ("),
        ("train actor_rollout_ref.actor.clip_ratio_low=0.2", "here it is --algorithm.gate.low 0.2"),
        ("train grpo +actor_rollout_ref.rollout.n=5", "here it is --samples-per-prompt 5"),
        ("train grpo trainer.project_name=x", "trainer.project_name is verl's; there is no such option here"),
        ("train algorithm.adv_estimator=grpo", "here it is ALGORITHM, the first argument of `train`"),
        ("train --use-vllm", "--use-vllm is TRL's; here it is --sampler.engine (vllm, sglang or llama_cpp"),
        ("train grpo --load_in_4bit", "--load_in_4bit is TRL's; here it is --learner.lora bits=4 (4-bit (NF4) frozen weights"),
        ("train grpo --log_completions", "--log_completions is TRL's; there is no such option here (every completion is"),
        ("train grpo --push_to_hub true", "there is no such option here (nothing is uploaded during training"),
        ("train --report_to wandb", "here it is --track wandb (wandb, tensorboard"),
        ("train --n_samples_per_prompt 4 --eps_clip 0.2", "options of other libraries:\n  --n_samples_per_prompt is OpenRLHF's"),
        ("sft --data x --num-train-epochs 3", "here it is --epochs 3"),
        ("sft --data x --learning-rate 1e-5", "here it is --lr 1e-5"),
        ("reward-model --data x --train_batch_size 8", "OpenRLHF's; here it is --batch-size ("),
        ("sft --data x --num-generations 4", "has no meaning here: it belongs to reinforcement learning"),
        ("train --batch-size 32", "there is no option --batch-size; here it is --prompts-per-step 32 (counted in prompts"),
        ("train --wandb", "there is no option --wandb; here it is --track wandb ("),
        ("train --max-length=100", "there is no option --max-length; here it is --max-tokens 100 ("),
        ("train grpo --kl 0.1", "here it is --algorithm.terms.kl-to-reference.beta 0.1 ("),
        ("train dapo --beta 0.1", "--algorithm.terms.kl-to-reference.beta 0.1 ("),
        ("train --epochs 3", "there is no option --epochs; here it is --steps (a run is measured in rollouts"),
        ("train --data a.jsonl", "here it is --task a.jsonl ("),
        ("train --group_size 8", "there is no option --group_size; here it is --samples-per-prompt 8"),
        ("train --clip 0.1", "here it is --algorithm.gate.low 0.1 --algorithm.gate.high 0.1 ("),
        ("train --rank 8", "here it is --learner.lora rank=8 ("),
        ("train --num-epochs 1 --model-name x", "options that have another name here:\n  there is no option --num-epochs"),
        ("train --log-every 5", "there is no option --log-every: every step is written to metrics.jsonl"),
    ],
)  # fmt: skip
def test_foreign_options_get_their_equivalent(run_command: Any, command: str, says: str) -> None:
    code, _, err = run_command(*command.split())
    assert code == 2
    assert says in err


def test_an_option_of_a_part_that_the_algorithm_lacks_names_the_part(run_command: Any) -> None:
    code, _, err = run_command(
        "train", "grpo", "--algorithm.terms.entropy.eta", "0.1", "--algorithm.terms.kl-to-reference.beta", "1"
    )
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("--algorithm.terms.entropy.eta is an option of Entropy, which this algorithm does not have")
    assert last.endswith("--algorithm.terms Entropy puts it in")


def test_our_options_with_foreign_looking_values_pass(run_command: Any) -> None:
    code, _, err = run_command("train", "--task", "data.jsonl", "--output", "trainer.x", "--dry-run")
    assert code == 0, err
