"""`policygrad convert`: other libraries' configurations become a run.toml that says where each line comes from, and trains."""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import convert_examples
import pytest

import policygrad as pg
from policygrad.commands.convert import convert_source, read_sources
from policygrad.commands.converters import openrlhf, prime_rl, trl, verl
from policygrad.commands.converters.base import Library, Setting, convert_options, find_reason, parse_value
from policygrad.commands.converters.reading import read_file
from policygrad.commands.converters.shell import read_commands
from policygrad.commands.converters.verl_algorithm import ESTIMATORS, LOSSES
from policygrad.commands.foreign_options import load_foreign_options
from policygrad.commands.train import list_train_flags, parse_run
from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import from_dict

VERL_SCRIPT = r"""#!/usr/bin/env bash
set -x
export NAME=first
rows="['$DATA/a.parquet', '$DATA/b.parquet']"
batch=${BATCH:-96}
answer=$((256 * 4))
if [ "$ENGINE" = "sglang" ]; then
    gpu=0.5
else
    gpu=0.7
fi
DATA_ARGS=(
    data.train_files="$rows"  # two of them
    # data.train_files=other.parquet
    data.train_batch_size=$batch
)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA_ARGS[@]}" \
    data.max_response_length=${answer} \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.005 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    +actor_rollout_ref.actor.mine=1 \
    ++actor_rollout_ref.rollout.n=5 \
    ~trainer.logger \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=$gpu \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=$NAME-$(date +%s) \
    trainer.total_epochs=3 $@ 2>&1 | tee log.txt
"""
VERL_YAML = """
algorithm: {adv_estimator: rloo, _target_: somewhere}
data: {train_files: a.parquet, train_batch_size: 8}
actor_rollout_ref:
  model: {path: m}
  actor: {ppo_mini_batch_size: 4, loss_agg_mode: seq-mean-token-sum-norm, strategy: "${other}"}
  rollout: {n: 4, name: vllm}
trainer: {total_training_steps: 7}
"""
OPENRLHF_SCRIPT = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray
   --pretrain m --advantage_estimator group_norm --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 64
   --eps_clip_low_high 0.2 0.3 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --prompt_data org/data --max_samples 640
   --remote_rm_url reward.py --generate_max_len 256 --num_episodes 2 --bf16
EOF
python3 -m $training_commands
"""
PRIME_RL_TOML = """
max_steps = 20
seq_len = 2048

[model]
name = "m"

[trainer.optim]
lr = 3e-6

[orchestrator]
batch_size = 128
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 128

[[orchestrator.train.source]]
name = "words"

[orchestrator.train.source.env.taskset]
id = "reverse-text"
"""
TRL_YAML = """
model_name_or_path: m
dataset_name: org/data
reward_funcs: [accuracy_reward]
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_completion_length: 64
loss_type: dr_grpo
scale_rewards: none
beta: 0.02
max_steps: 12
"""
TRL_SCRIPT = '''"""Try it: python trl/examples/mine.py --lr 1e-5"""
import argparse

MODEL = "m"
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()
training_args = RLOOConfig(num_generations=4, learning_rate=args.lr, max_steps=find_steps(), output_dir="out", num_iterations=2)
'''
TRL_COMMAND = shlex.split(
    "accelerate launch --num_processes 2 examples/scripts/grpo.py --model_name_or_path m --num_generations 8 --use_vllm "
    "--steps_per_generation 4 --per_device_train_batch_size 4 --epsilon 0.1 --epsilon_high 0.3 --loss_type dapo --use_peft "
    "--lora_r 8 --dataset_name a/b --reward_funcs mine.score --max_steps 10"
)


def convert(text: str, tmp_path: Path, name: str = "run.sh", rows: int | None = None) -> tuple[Run, str]:
    """Return the run that a file becomes, and the text of its run.toml."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return convert_words(str(path), rows=rows)


def convert_words(*words: str, rows: int | None = None) -> tuple[Run, str]:
    _, text = convert_source(read_sources(words)[0], rows)
    return from_dict(tomllib.loads(text), Run(), "run.toml"), text


def same(algorithm: Algorithm, argv: str) -> None:
    """Check that an algorithm is that of a command line of `train`."""
    assert replace(algorithm, name="") == replace(
        parse_run(argv.split())[0].algorithm, name="", samples_per_prompt=algorithm.samples_per_prompt
    )


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("ENGINE", "vllm")
    monkeypatch.delenv("BATCH", raising=False)
    run, text = convert(VERL_SCRIPT, tmp_path, rows=960)
    assert (run.prompts_per_step, run.samples_per_prompt, run.sampling.max_tokens, run.steps) == (96, 5, 1024, 30)
    assert run.task == "/data/a.parquet+/data/b.parquet"
    assert (run.optimizer.warmup, run.sampler.engine, run.sampler.gpu_memory, run.track) == (
        30,
        "vllm",
        0.7,
        ("wandb",),
    )
    same(
        run.algorithm,
        "grpo --algorithm.advantage GroupMean,GroupStd --algorithm.advantage.group-std.eps 1e-6 --algorithm.aggregation TokenMean "
        "--algorithm.gate.c 3 --algorithm.terms.kl-to-reference.beta 0.005 --algorithm.update-rule.minibatches 3",
    )
    assert "beta = 0.005  # actor_rollout_ref.actor.kl_loss_coef=0.005\n" in text
    assert "c = 3.0  # verl's default: actor_rollout_ref.actor.clip_ratio_c=3.0\n" in text
    assert "## Unknown, and left out:\n## - actor_rollout_ref.actor.mine=1\n" in text
    assert "other.parquet" not in text


def test_a_yaml_of_verl(tmp_path: Path) -> None:
    run, text = convert(VERL_YAML, tmp_path, "verl.yaml")
    assert (run.steps, run.task, run.model) == (7, "a.parquet", "m")
    same(
        run.algorithm,
        "rloo --algorithm.ratio Token --algorithm.gate Clip --algorithm.gate.c 3 --algorithm.aggregation FixedLength "
        "--algorithm.shaping none --algorithm.update-rule.minibatches 2",
    )
    assert "strategy" not in text  # follows another option


@pytest.mark.parametrize(
    ("overrides", "argv"),
    [
        ("algorithm.adv_estimator=gae algorithm.lam=0.9", "ppo --algorithm.shaping none --algorithm.gate.c 3 "
         "--algorithm.critic.lr 1e-5 --algorithm.critic.clip 0.5 --algorithm.advantage.gae.lam 0.9 --algorithm.critic.lam 0.9 "
         "--algorithm.update-rule.epochs 1"),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True",
         "reinforce_pp --algorithm.gate.c 3 --algorithm.shaping.kl-in-reward.beta 0.001 --algorithm.update-rule.minibatches 1"),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
         "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.clip_ratio_high=0.3",
         "gspo --algorithm.advantage GroupMean --algorithm.gate.low 0.2 --algorithm.gate.high 0.3 "
         "--algorithm.update-rule.minibatches 1"),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.policy_loss.loss_mode=cispo "
         "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.clip_ratio_low=10 "
         "actor_rollout_ref.actor.clip_ratio_high=0.2",
         "cispo --algorithm.advantage GroupMean --algorithm.gate.high 1.2 --algorithm.shaping none --algorithm.filters none "
         "--algorithm.update-rule.minibatches 1"),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl "
         "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.clip_ratio=0.05 "
         "actor_rollout_ref.actor.clip_ratio_c=20 algorithm.rollout_correction.bypass_mode=True",
         "dppo --algorithm.aggregation TokenMean --algorithm.gate.measure kl --algorithm.gate.delta 0.05 --algorithm.gate.c 20 "
         "--algorithm.update-rule.minibatches 1"),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 algorithm.norm_adv_by_std_in_grpo=False "
         "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3 "
         "actor_rollout_ref.actor.entropy_coeff=0.01",
         "dr_grpo --algorithm.aggregation TokenMean --algorithm.gate.c 3 --algorithm.corrections TruncatedIS "
         "--algorithm.corrections.truncated-is.cap 3 --algorithm.terms ExactEntropy --algorithm.terms.exact-entropy.eta 0.01"),
    ],
)  # fmt: skip
def test_estimators_and_losses_of_verl(overrides: str, argv: str) -> None:
    batches = (
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "data.train_files=a.parquet",
    )
    run, _ = convert_words("python3", "-m", "verl.trainer.main_ppo", *batches, *overrides.split())
    same(run.algorithm, argv)


BATCHES = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_files=a.parquet")
MASK, WEIGHT = pg.parts.MismatchMask, pg.TruncatedIS
GEO = {"high": 1.001001001, "low": 0.999000999}  # verl bounds 1/ρ: 1/0.999 and 1/1.001


@pytest.mark.parametrize(
    ("preset", "corrections", "rest"),
    [
        ("decoupled_token_is", [WEIGHT(2.0, "token")], {}),
        ("decoupled_seq_is", [WEIGHT(2.0, "sequence")], {}),
        ("decoupled_seq_is_rs", [WEIGHT(2.0, "sequence"), MASK("ratio", "sum", 2.0, 0.5, denominators="kept")], {}),
        ("decoupled_geo_rs", [MASK("ratio", "mean", **GEO, denominators="kept")], {}),
        ("decoupled_geo_rs_seq_tis", [WEIGHT(2.0, "sequence"), MASK("ratio", "mean", **GEO, denominators="kept")], {}),
        ("decoupled_geo_rs_token_tis", [WEIGHT(2.0), MASK("ratio", "mean", **GEO, denominators="kept")], {}),
        ("decoupled_k3_rs", [MASK("k3", "mean", 0.01, denominators="kept")], {}),
        ("decoupled_k3_rs_seq_tis", [WEIGHT(2.0, "sequence"), MASK("k3", "mean", 0.01, denominators="kept")], {}),
        ("decoupled_k3_rs_token_tis", [WEIGHT(2.0), MASK("k3", "mean", 0.01, denominators="kept")], {}),
        ("bypass_ppo_clip", [], {"gate": pg.Clip(0.2, 0.2, 3.0)}),
        ("bypass_ppo_clip_geo_rs", [MASK("ratio", "mean", **GEO, of="current")], {"gate": pg.Clip(0.2, 0.2, 3.0)}),
        ("bypass_ppo_clip_k3_rs", [MASK("k3", "mean", 0.01, of="current")], {"gate": pg.Clip(0.2, 0.2, 3.0)}),
        ("bypass_pg_is", [], {"ratio": pg.SequenceProduct(), "gate": pg.ClippedImportance(0.0, 2.0)}),
        ("bypass_pg_geo_rs", [MASK("ratio", "mean", **GEO, of="current")], {"gate": pg.parts.UnitWeight()}),
        ("bypass_pg_geo_rs_seq_tis", [MASK("ratio", "mean", **GEO, of="current")], {"ratio": pg.SequenceProduct()}),
        ("bypass_pg_geo_rs_token_tis", [MASK("ratio", "mean", **GEO, of="current")], {"ratio": pg.Token()}),
        ("disabled", [], {}),
    ],
)  # fmt: skip
def test_presets_of_verls_rollout_correction(
    preset: str, corrections: list[pg.Correction], rest: dict[str, Any]
) -> None:
    run, _ = convert_words("python3", "-m", "verl.trainer.main_ppo", *BATCHES, "algorithm.adv_estimator=grpo",
                           "actor_rollout_ref.rollout.n=4", f"algorithm.rollout_correction={preset}")  # fmt: skip
    assert len(run.algorithm.corrections) == len(corrections)
    for ours, expected in zip(run.algorithm.corrections, corrections, strict=True):
        assert replace(ours, **{f: getattr(expected, f) for f in ("high", "low") if hasattr(ours, f)}) == expected
        for name in ("high", "low"):
            assert (getattr(ours, name, 0) or 0) == pytest.approx(getattr(expected, name, 0) or 0, rel=1e-8)
    assert run.algorithm.old_policy == ("sampler" if preset.startswith("bypass") else "learner")
    for field, part in rest.items():
        assert getattr(run.algorithm, field) == part


def test_filters_bounds_and_the_best_of_a_group() -> None:
    options = (
        "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1 0.9 --reward.clip_range -2 2 "
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis "
        "--rollout.n_samples_per_prompt 4 --algo.advantage.estimator"
    )
    words = ("python3", "-m", "openrlhf.cli.train_ppo_ray", *options.split())
    run, _ = convert_words(*words, "reinforce")
    assert run.algorithm.filters == (pg.parts.RewardRange(low=0.1, high=0.9),)
    assert run.algorithm.shaping[-1] == pg.parts.ClipReward(-2.0, 2.0)
    assert run.algorithm.corrections == (MASK(high=5.0, low=0.5), WEIGHT(float("inf")))
    assert "add ClipAdvantage(low=-2, high=2)" in convert_words(*words, "group_norm")[1]
    verl = (
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        *BATCHES,
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo_passk",
    )
    run, _ = convert_words(
        *verl, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=abs"
    )
    assert run.algorithm.advantage == (pg.parts.MarginalMax(), pg.GroupStd(eps=1e-6))
    assert run.algorithm.terms == (pg.KLToReference(0.001, "abs"),)
    run, _ = convert_words(*verl, "algorithm.norm_adv_by_std_in_grpo=False")
    assert run.algorithm.advantage == (pg.parts.MarginalMax(),)


def test_the_window_of_prime_rl(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(
        '[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.05\n[orchestrator]\nbatch_size = 32\ngroup_size = 8\n'
    )
    _, text = convert_source(read_sources([str(file)])[0])
    algorithm = from_dict(tomllib.loads(text), Run(), "x").algorithm
    assert algorithm.gate == pg.Importance()
    assert algorithm.corrections == (MASK("tv", "token", 0.05, of="current"),)
    assert algorithm.terms == (pg.KLToOld(2e-3, "k2"),)


def test_a_preset_of_verl_takes_arguments_and_several_rejections_are_several_masks() -> None:
    verl = (
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        *BATCHES,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
    )
    called = "algorithm.rollout_correction=RolloutCorrectionConfig.decoupled_k3_rs_token_tis(is_threshold=3, rs_threshold=0.02)"
    run, _ = convert_words(*verl, called)
    assert run.algorithm.corrections == (WEIGHT(3.0), MASK("k3", "mean", 0.02, denominators="kept"))
    own = "algorithm.rollout_correction"
    run, text = convert_words(*verl, f"{own}.rollout_is=token", f"{own}.rollout_is_batch_normalize=True",
                              f"{own}.rollout_rs=token_k1,seq_max_k2", f"{own}.rollout_rs_threshold=0.5_2.0,2.5")  # fmt: skip
    assert run.algorithm.corrections == (
        WEIGHT(2.0, normalise=True),
        MASK("ratio", "token", 2.0, 0.5, denominators="kept"),
        MASK("k2", "any", 2.5, denominators="kept"),
    )
    assert "verl's k1 bounds μ/π" in text
    for wrong, says in (
        (f"{own}=decoupled_k1_rs", "is no preset of verl's: decoupled_token_is"),
        (f"{own}=decoupled_geo_rs(is_threshold=2)", "is_threshold=2 is no argument of decoupled_geo_rs"),
    ):
        with pytest.raises(pg.ConfigError, match=re.escape(says)):
            convert_words(*verl, wrong)


@pytest.mark.full
def test_every_estimator_of_verl_with_every_loss_is_a_run() -> None:
    for estimator in ESTIMATORS:
        for loss in ("vanilla", *LOSSES):
            actor = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
            run, _ = convert_words(f"algorithm.adv_estimator={estimator}", actor, "actor_rollout_ref.rollout.n=4")
            assert run.algorithm.update_rule.updates == 4


@pytest.mark.full
def test_every_estimator_of_openrlhf_is_a_run() -> None:
    words = ("python3", "-m", "openrlhf.cli.train_ppo_ray", "--rollout.n_samples_per_prompt", "4")
    for estimator in openrlhf.ESTIMATORS:
        for more in (
            "--algo.advantage.no_std_norm",
            "--algo.kl.use_loss",
            "--algo.kl.init_coef=0",
            "--actor.policy_loss_type=gspo",
        ):
            run, _ = convert_words(*words, "--algo.advantage.estimator", estimator, more)
            assert run.samples_per_prompt == 4


def test_a_program_of_its_own_is_named() -> None:
    for program, says in (
        ("recipe.mine.main_mine", "recipe.mine.main_mine has code of its own beside verl's"),
        ("verl.experimental.one_step_off_policy.main_ppo", "--max-staleness 1 is one step ahead"),
    ):
        _, text = convert_words("python3", "-m", program, "algorithm.adv_estimator=grpo")
        assert says in re.sub(r"\n##\s+", " ", text)
    _, text = convert_words("python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo")
    assert "code of its own" not in text
    assert "\n# model =  # to complete, as said above\n# task =  # to complete, as said above\n# steps =  #" in text


def test_one_completion_per_prompt_is_scored_without_a_baseline_as_verl_does() -> None:
    run, _ = convert_words("algorithm.adv_estimator=grpo", "data.train_files=a.parquet")
    assert run.samples_per_prompt == 1
    assert run.algorithm.advantage == ()


def test_arguments_of_openrlhf_under_both_of_their_names(tmp_path: Path) -> None:
    run, text = convert(OPENRLHF_SCRIPT, tmp_path)
    assert (run.model, run.prompts_per_step, run.samples_per_prompt, run.sampling.max_tokens) == ("m", 32, 8, 256)
    assert (run.task, run.reward, run.steps) == ("hf:org/data", ("openrlhf:reward.py",), 40)
    same(
        run.algorithm,
        "grpo --algorithm.aggregation TokenMean --algorithm.gate.high 0.3 --algorithm.terms.kl-to-reference.beta 1e-3 "
        "--algorithm.update-rule.minibatches 4",
    )
    assert "minibatches = 4  # --train_batch_size 64 – 32 × 8 completions / 64\n" in text
    words = OPENRLHF_SCRIPT.split("train_ppo_ray")[1].split("EOF")[0].split()
    new = [f"--{openrlhf.RENAMED.get(word[2:], word[2:])}" if word.startswith("--") else word for word in words]
    assert convert_words("python3", "-m", "openrlhf.cli.train_ppo_ray", *new)[0] == run


def test_a_toml_of_prime_rl(tmp_path: Path) -> None:
    run, text = convert(PRIME_RL_TOML, tmp_path, "rl.toml")
    assert (run.prompts_per_step, run.samples_per_prompt, run.steps, run.max_staleness) == (8, 16, 20, 8)
    assert (run.task, run.environment, run.sampling.max_tokens) == (
        "verifiers:reverse-text",
        "verifiers:reverse-text",
        128,
    )
    same(run.algorithm, "prime_rl")
    assert "prompts_per_step = 8  # batch_size" not in text
    assert (
        "prompts_per_step = 8  # orchestrator.batch_size = 128, orchestrator.group_size = 16 – 128 completions\n"
        in text
    )
    path = str(tmp_path / "rl.toml")
    assert convert_words("uv", "run", "rl", "@", path, "--orchestrator.batch-size", "64")[0] == replace(
        run, prompts_per_step=4
    )
    alone = "batch_size = 8\ngroup_size = 4\nmax_steps = 3\n[train.sampling]\nmax_completion_tokens = 9\n"
    run, _ = convert(alone, tmp_path, "orchestrator.toml")
    assert (run.prompts_per_step, run.steps, run.sampling.max_tokens) == (2, 3, 9)


def test_a_yaml_and_a_command_of_trl(tmp_path: Path) -> None:
    run, _ = convert(TRL_YAML, tmp_path, "grpo.yaml")
    assert (run.prompts_per_step, run.samples_per_prompt, run.steps, run.lr) == (4, 4, 12, 1e-6)
    assert (run.reward, run.task, run.optimizer.schedule) == (("math",), "hf:org/data", "linear")
    same(run.algorithm, "dr_grpo --algorithm.terms KLToReference --algorithm.terms.kl-to-reference.beta 0.02")
    assert convert_words("trl", "grpo", "--config", str(tmp_path / "grpo.yaml"), "--learning_rate", "2e-6")[
        0
    ] == replace(run, lr=2e-6)
    run, text = convert_words(*TRL_COMMAND)
    assert (run.prompts_per_step, run.steps, run.learner.lora, run.learner.world_size) == (4, 3, "rank=8,alpha=32", 2)
    assert run.reward == ("trl:mine:score",)
    same(
        run.algorithm,
        "grpo --algorithm.aggregation TokenMean --algorithm.terms none --algorithm.gate.low 0.1 --algorithm.gate.high 0.3 "
        "--algorithm.corrections MaskedIS --algorithm.corrections.masked-is.low 0 --algorithm.corrections.masked-is.high 3 "
        "--algorithm.corrections.masked-is.level sequence --algorithm.update-rule.minibatches 4",
    )
    assert "steps = 3  # --max_steps 10 – optimizer steps / 4 a rollout\n" in text


def test_a_script_of_trl_is_read_from_its_code(tmp_path: Path) -> None:
    run, text = convert(TRL_SCRIPT, tmp_path, "mine.py")
    assert (run.samples_per_prompt, run.lr, run.output, run.algorithm.update_rule.updates) == (4, 1e-4, "out", 2)
    assert "max_steps=find_steps(): computed by a command or by code, which is not run" in text
    assert "reward: the script names it in its code" in text


CONVERTERS = Path(verl.__file__).parent
LIBRARIES = (
    verl.VERL,
    openrlhf.OPENRLHF,
    prime_rl.PRIME_RL,
    *(trl.make_library(name) for name in trl.DEFAULTS),
)


def test_every_option_of_the_tables_is_answered() -> None:
    """Nothing that docs/from-other-libraries.md lists is unknown to the converter."""
    for library in LIBRARIES:
        for name in load_foreign_options()[0][library.name]:
            value = library.defaults.get(library.renamed.get(name, name), 1)
            message, unknown = _try_option(library, name, value)
            assert not unknown, name
            assert not message or "=1" in message


def test_a_wrong_value_is_an_error_that_names_its_option() -> None:
    """Whatever its kind: no other exception, and no division by a batch of 0."""
    for library in LIBRARIES:
        for name in {*library.defaults, *load_foreign_options()[0][library.name]} - {"trainer"}:
            for value in ("x", -1, 0, 1.5, True, [], [1], {"a": 1}, None, "$X", float("nan")):
                message, _ = _try_option(library, name, value)
                assert not message or name in message or library.renamed[name] in message


def _try_option(library: Library, name: str, value: Any) -> tuple[str, list[str]]:
    """Return the error of an option alone, and what is unknown."""
    try:
        return "", convert_options(library, [Setting(name, value, f"{name}={value}", 7)]).unknown
    except ConfigError as error:
        return str(error), []


def test_a_pattern_of_options_without_an_equivalent_answers_with_its_reason() -> None:
    assert "FSDP2" in (find_reason("verl", "actor_rollout_ref.ref.megatron.param_offload") or "")
    assert find_reason("verl", "actor_rollout_ref.actor.mine") is None


def test_reasons_name_options_that_exist() -> None:
    known = {flag for name in ("grpo", "ppo", "distill", "prime_rl") for flag in list_train_flags(name)}
    places = (CONVERTERS / "left_out.toml", *CONVERTERS.glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in places)
    sections = "learner|sampler|optimizer|checkpoint|evaluation|rewards|sampling"
    options = set(re.findall(rf"[ (]((?:{sections})\.[a-z_-]*[a-z])\b", text))
    named = {f"--{name.removeprefix('sampling.').replace('_', '-')}" for name in options}
    without_commands = re.sub(r"policygrad (?!train)[^\"]*", "", text)
    named |= set(re.findall(r"(?<![\w`-])(--[a-z][\w.-]*[a-z])\b", without_commands))
    theirs = {
        "--algo.advantage.estimator",
        "--help",
        "--config-path",
        "--config-name",
        "--config-dir",
        "--config",
        "--rows",
        "--command",
        "--name",
        "--output",
    }
    assert len(options) > 12
    assert not {flag for flag in named - known - theirs if not flag.startswith("--NAME")}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.sh", "echo hello\n", "run.sh is not recognised: it holds none of a command of verl"),
        ("run.sh", 'python3 -m verl.trainer.main_ppo data.train_files="a\n', "run.sh: line 1: the quote '\"a"),
        ("run.sh", "A=(\n  1\n", "line 1: the array that begins here is not closed: add )"),
        ("run.sh", "python3 -m verl.trainer.main_ppo data.train_files=a \\\n  oops\n", "line 2: 'oops' is not an override of verl"),
        ("run.sh", "python3 -m verl.trainer.main_ppo \\\n algorithm.adv_estimator=grpo data.train_batch_size=many\n",
         "line 2: data.train_batch_size=many: data.train_batch_size must be a number, not 'many'"),
        ("run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=mine",
         "algorithm.adv_estimator=mine has no equivalent here"),
        ("run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.temperature=-1",
         "(from line 1: actor_rollout_ref.rollout.temperature=-1)"),
        ("run.sh", "deepspeed --module openrlhf.cli.train_sft --pretrain m", "not a policy gradient: policygrad sft --data FILE"),
        ("run.sh", "python3 -m openrlhf.cli.train_ppo_ray m --pretrain x", "line 1: 'm' stands before the first option"),
        ("run.sh", "python examples/scripts/dpo.py --model_name_or_path m", "methods that learn from preferences are not included"),
        ("a.toml", "[algorithm]\nname = 'grpo'\n", "a.toml: it is a run.toml already"),
        ("a.toml", "[mine]\nx = 1\n", "its tables, mine, are not prime-rl's"),
        ("a.toml", "x = \n", "a.toml: not valid TOML"),
        ("a.toml", "[orchestrator.algo]\ntype = 'sft'\n", "policygrad sft --data FILE does"),
        ("a.yaml", "x: [1\n", "a.yaml cannot be read as a configuration"),
        ("a.yaml", "colour: blue\n", "its keys, colour, are neither verl's"),
        ("a.yaml", "model_name_or_path: m\n", "does not say which trainer of TRL it is for"),
        ("a.py", "def f(:\n", "a.py: line 1: not Python"),
        ("a.py", "print(1)\n", "a.py is not recognised"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_line_and_remedy(
    run_command: Any, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, _, err = run_command("convert", str(tmp_path / name))
    assert code == 2
    assert says in err


def test_what_is_no_file_or_no_command(run_command: Any, tmp_path: Path) -> None:
    for words, says in (
        ((), "nothing is named to convert: give a command of verl"),
        (("missing.sh",), "cannot read missing.sh: No such file or directory"),
        (("--colour", "blue"), "is not recognised: give a command of verl"),
        ((str(tmp_path / "two.sh"), "--command", "3"), "has 2; choose 1 to 2"),
        (
            (str(tmp_path / "two.sh"), "--output", str(tmp_path / "two.sh")),
            "exists: choose another --output, or add --overwrite",
        ),
    ):
        (tmp_path / "two.sh").write_text(
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n" * 2, encoding="utf-8"
        )
        code, _, err = run_command("convert", *words)
        assert code == 2
        assert says in err
    (tmp_path / "latin.sh").write_bytes(b"\xe9\n")
    code, _, err = run_command("convert", str(tmp_path / "latin.sh"))
    assert "latin.sh is not UTF-8 (byte 0): save it as UTF-8" in err


def test_a_variable_that_nothing_sets_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH", raising=False)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.delenv("D", raising=False)
    paths = "actor_rollout_ref.model.path=$MODEL trainer.default_local_dir=$D"
    options = f"algorithm.adv_estimator=grpo data.train_batch_size=$BATCH {paths}"
    script = f"python3 -m verl.trainer.main_ppo {options}\n"
    run, text = convert(script, tmp_path)
    assert "data.train_batch_size=$BATCH: nothing sets BATCH; BATCH=… before `policygrad convert` does" in text
    assert "actor_rollout_ref.model.path=$MODEL: nothing sets MODEL" in text
    assert (run.prompts_per_step, run.model, run.output) == (1024, "$MODEL", None)
    assert '# output = "$D"  # trainer.default_local_dir=$D' in text
    monkeypatch.setenv("BATCH", "64")
    assert convert(script, tmp_path)[0].prompts_per_step == 64


def test_a_token_of_the_environment_does_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MODEL_TOKEN"):
        monkeypatch.setenv(name, "hidden")
    options = (
        "+trainer.key=$WANDB_API_KEY trainer.project_name=${HF_TOKEN:-none} actor_rollout_ref.model.path=$MODEL_TOKEN"
    )
    _, text = convert(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {options}\n", tmp_path)
    assert "hidden" not in text
    assert "$WANDB_API_KEY" in text
    assert "MODEL_TOKEN is not read from the environment, since it is named like a secret" in re.sub(
        r"\s*\n##\s+", " ", text
    )


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("A=0123456789", 'A="$A$A"'),
        ("export A=0123456789", 'export A="$A$A"'),
        ("A=(0123456789)", 'A+=("${A[@]}" "${A[@]}")'),
    ],
)
def test_variables_that_double_with_each_line_are_refused(first: str, again: str) -> None:
    script = "\n".join([first, *[again] * 25])
    with pytest.raises(ConfigError, match="A has more than 1,000,000 characters: shorten it"):
        read_commands(script, {})


def test_a_file_that_names_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"rl @ {path} --max-steps 3\n")
    with pytest.raises(ConfigError, match=r"prime-rl's configuration is a \.toml"):
        read_file(path)


def test_the_command_writes_a_file_and_counts(run_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    code, out, _ = run_command("convert", *TRL_COMMAND, "--output", str(path), "--rows", "100")
    assert code == 0
    assert out.startswith(f"{path}: 14 of 14 options of TRL, 0 unknown")
    assert parse_run(["--config", str(path)])[0].model == "m"


CASES = {
    "verl": ("run.sh", VERL_SCRIPT),
    "OpenRLHF": ("run.sh", OPENRLHF_SCRIPT),
    "prime-rl": ("rl.toml", PRIME_RL_TOML),
    "TRL": ("grpo.yaml", TRL_YAML),
}
SMALL = (
    "--model tiny --task embedded --steps 1 --max-tokens 4 --prompts-per-step 2 --sampler.engine local --learner.world-size 1 "
    "--learner.dtype fp32 --evaluation.problems 0 --max-staleness 0 --overwrite"
)


@pytest.mark.parametrize(
    "library", [name if name == "TRL" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_what_is_written_trains(library: str, run_command: Any, tmp_path: Path) -> None:
    name, text = CASES[library]
    _, written = convert(text, tmp_path, name)
    path = tmp_path / "run.toml"
    # data, rewards and trackers are the task's own
    path.write_text(
        re.sub(r"(?m)^(eval_data|environment|reward|track|colocate|gpu_memory) = ", "# ", written), encoding="utf-8"
    )
    code, _, err = run_command("train", "--config", str(path), *SMALL.split(), "--output", str(tmp_path / "run"))
    assert code == 0, err
    assert (tmp_path / "run" / "result.json").exists()


def test_examples_are_counted(tmp_path: Path) -> None:
    """scripts/convert_examples.py: files that start a policy gradient, and what became of their options."""
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "good.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.shuffle=True mine.x=1\n"
    )
    (folder / "bad.sh").write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=mine\n")
    (folder / "other.sh").write_text("echo\n")
    counts = convert_examples.measure("verl", tmp_path)
    assert [counts[key] for key in ("files", "converted", "options", "translated", "left_out", "unknown")] == [
        2,
        1,
        3,
        1,
        1,
        1,
    ]
    assert counts["failed"][0]["file"] == "examples/bad.sh"


@pytest.mark.full
def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """With a few characters gone or put in, a file is an error with a remedy or still a run: nothing else is raised."""
    random, pieces = Random(0), [*"'\"\\${}()[]=#;|&<>\n\t~`\x1f\x7f", "$((", "EOF", "if [ ", "nan", "1e999", "-1"]
    read = 0
    for _ in range(1500):
        name, text = random.choice([*CASES.values(), ("verl.yaml", VERL_YAML), ("mine.py", TRL_SCRIPT)])
        for _ in range(random.randint(1, 5)):
            i = random.randrange(len(text) + 1)
            text = (
                text[:i] + (random.choice(pieces) if random.random() < 0.5 else "") + text[i + random.randint(0, 9) :]
            )
        with contextlib.suppress(ConfigError):
            convert(text, tmp_path, name)
            read += 1
    assert read > 100


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nrun $A ${A} \"$A b\" '$A'", ["run", "1", "1", "1 b", "$A"]),
        ("run ${X:-2} ${X:=3} $X ${Y-4} ${X:+5}", ["run", "2", "3", "3", "4", "5"]),
        ("export A=1 B=2\nrun $A$B", ["run", "12"]),
        ("A=(1 'two words'\n 3) \nA+=(4)\nrun \"${A[@]}\" ${A[@]}", ["run", *(["1", "two words", "3", "4"] * 2)]),
        ("n=3\nrun $((n * 4 + 2**2)) $(($n/2))", ["run", "16", "1"]),
        ("run a \\\n  b # why \\\n  c", ["run", "a", "b", "c"]),
        ("run $NOWHERE $(date) $(pwd)/x $@ ${1:-z}", ["run", "$NOWHERE", "$COMMAND", "./x", "z"]),
        ("if [ -n \"$NOWHERE\" ]; then\nA=1\nelif [[ a == a ]]; then\nA=2\nelse\nA=3\nfi\nrun $A", ["run", "2"]),
        ("cat > f <<'EOF'\nrun wrong\nEOF\nrun right > out.txt 2>&1", ["run", "right"]),
        ("A='x y'\nrun $A \"$A\" a\\ b", ["run", "x", "y", "x y", "a b"]),
        (': "${A:=7}"\nrun $A', ["run", "7"]),
        ('A="{\\"b\\": 1}"\nrun "$A" \\\'q\\\'', ["run", '{"b": 1}', "'q'"]),
    ],
)  # fmt: skip
def test_words_are_those_of_the_shell(script: str, words: list[str]) -> None:
    [*_, command] = [c for c in read_commands(script, {}) if c[0].text == "run"]
    assert [word.text for word in command] == words


def test_words_know_their_lines() -> None:
    [command] = read_commands("\nrun a \\\n b \\\n # c\n  'd\ne' f\n", {})
    assert [(word.text, word.line) for word in command] == [("run", 2), ("a", 2), ("b", 3), ("d\ne", 6), ("f", 6)]


def test_values_are_those_of_hydra() -> None:
    text = "[1, 'a b', {x: 1e-6, y: true}, null, 1_000, -3, .5, v1.5]"
    assert parse_value(text) == [1, "a b", {"x": 1e-6, "y": True}, None, 1000, -3, 0.5, "v1.5"]


def test_the_replay_buffer_of_trl(tmp_path: Path) -> None:
    """With its default size, another one, and none."""
    file = tmp_path / "train.py"
    shape = "per_device_train_batch_size=8, num_generations=4, max_steps=5"

    def filters(more: str) -> tuple[pg.Filter, ...]:
        file.write_text(f"from x import y\nargs = GRPOWithReplayBufferConfig({shape}{more})\n")
        _, text = convert_source(read_sources([str(file)])[0])
        return from_dict(tomllib.loads(text), Run(), "x").algorithm.filters

    assert filters("") == (pg.parts.ReplayBuffer(),)
    masked = (pg.parts.ReplayBuffer(size=8), pg.MaskTruncated(keep_in_statistics=True))
    assert filters(", replay_buffer_size=8, mask_truncated_completions=True") == masked
    assert filters(", replay_buffer_size=0") == ()


def test_gold_of_trl(tmp_path: Path) -> None:
    """A divergence over the vocabulary; with ULD a teacher with another tokenizer, its own unless one is named."""
    shape = "per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_steps=5, "

    def read(more: str) -> tuple[Run, str]:
        teacher = "teacher_model_name_or_path='t', "
        run, text = convert(f"args = GOLDConfig({shape}{teacher}{more})\n", tmp_path, "train.py")
        return run, " ".join(text.replace("#", "").split())

    term = "--algorithm.advantage.teacher-log-ratio.coefficient 0 --algorithm.terms ExactKLToReference"
    term += " --algorithm.terms.exact-kl-to-reference.alpha"
    run, text = read("")
    assert (run.prompts_per_step, run.samples_per_prompt, run.steps, run.lr, run.reward) == (4, 4, 5, 1e-7, ())
    assert (run.sampling.max_tokens, run.sampling.temperature, run.sampling.top_p) == (128, 0.9, 0.95)
    same(run.algorithm, f"distill --teacher t {term} 0.5 --algorithm.terms.exact-kl-to-reference.over vocabulary")
    assert "as with lmbda = 1: TRL takes 50% of the completions from the data" in text
    run, text = read("lmbda=1.0, beta=0.0, top_p=1.0, generation_batch_size=4, teacher_tokenizer_name_or_path='s'")
    same(run.algorithm, f"distill --teacher t {term} 0")
    assert run.prompts_per_step == 4
    assert "lmbda = 1:" not in text
    assert "teacher_tokenizer_name_or_path='s': without use_uld_loss both models have the policy's tokenizer" in text
    run, text = read("use_uld_loss=True, lmbda=0.75, seq_kd=True, top_p=0.95, beta=0.5, uld_use_hybrid_loss=True")
    same(run.algorithm, "distill --teacher t --algorithm.reference.tokenizer t")
    assert run.sampling.top_p == 1
    for left in (
        "as with lmbda = 1: TRL takes 25% of the completions from the teacher's",
        "top_p=0.95: a t",
        "beta=0.5: of t",
    ):
        assert left in text
    run, _ = read("use_uld_loss=True, teacher_tokenizer_name_or_path='s'")
    same(run.algorithm, "distill --teacher t --algorithm.reference.tokenizer s")
    with pytest.raises(ConfigError, match="lmbda=0 learns from the data's completions alone"):
        read("lmbda=0.0")
    with pytest.raises(ConfigError, match="beta=2 must be between 0 and 1"):
        read("beta=2.0")
