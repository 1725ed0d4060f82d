"""TRL's online trainers, with the sampling, the advantages, the equation and the passes of policygrad.

The loop around them is transformers' `Trainer`, which TRL's trainers extend as well: epochs, callbacks, schedules, optimizers,
checkpoints, `evaluate`, `save_model` and what else scripts do with a trainer are its own.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed

from policygrad.core import masked
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.masked import Groups
from policygrad.core.metrics import Metrics
from policygrad.errors import NumericsError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.tokenizer import pad_token_id
from policygrad.models.traits import adapter_configs, read_balance_coefficient
from policygrad.rollout.trajectory import EVALUATE, TRAIN
from policygrad.samplers.base import LendsMemory, Sampler
from policygrad.training.policy_setup import LoadedPolicy, load_policy, make_sampler
from policygrad.trl.config import GRPOConfig, OnlineConfig, RLOOConfig
from policygrad.trl.data import Row, is_stream, make_loader
from policygrad.trl.environments import Environments, list_methods, make_reward
from policygrad.trl.fields import check_fields
from policygrad.trl.folder import RunLog
from policygrad.trl.generate import GenerateSampler, replaces_generate
from policygrad.trl.loading import load_model, load_processor, load_reward_functions, prepare_tokenizer
from policygrad.trl.sampling import RowSampler, SampledRows
from policygrad.trl.scoring import RewardLog, Rewards, sum_rewards
from policygrad.trl.translate import Rhythm, is_length_weighted, translate_algorithm, translate_run, with_micro_batches
from policygrad.utils.async_runner import AsyncRunner

logger = transformers.utils.logging.get_logger("policygrad.trl")

_PUBLIC = {
    "_metrics": "state.log_history",
    "_logs": "the files in output_dir/completions (log_completions=True)",
    "_step": "state.global_step",
    "_generate": "rollout_func, which samples in its place",
    "_generate_and_score_completions": "rollout_func, and reward_funcs",
    "_calculate_rewards": "reward_funcs",
    "_compute_loss": "run.algorithm, the loss as parts",
    "_get_per_token_logps_and_entropies": "policygrad.Learner.evaluate",
    "_buffered_inputs": "the files in output_dir/completions (log_completions=True)",
    "vllm_generation": "use_vllm, whose server is started and updated here",
    "_env_tools": "tools",
    "_environment_pool": "environments",
}
"""Private attributes of TRL's that scripts reach for -> what there is in public."""


STATE, MASTERS = "policygrad.json", "policygrad.safetensors"
"""Files of a checkpoint beside those of transformers."""


@dataclass(frozen=True, eq=False)
class Generated:
    """The completions of a generation, ready to learn from."""

    batch: Batch
    psi: Tensor
    """[B, T]."""
    order: Tensor
    """[B]; the rows of each micro-batch, one after the other."""
    num_tokens: float
    """Tokens that learn."""


class OnlineTrainer(transformers.Trainer):
    """What the two trainers share."""

    kind: ClassVar[str]
    config_class: ClassVar[type[OnlineConfig]]
    # What scripts may replace; transformers allows None and less than what is here.
    args: Any
    model: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = self.config_class(f"{name.split('/')[-1] or 'model'}-{self.kind}")
        check_fields(args)
        self.algorithm: Algorithm = translate_algorithm(args)
        """The algorithm as parts of the equation."""
        self.rhythm = Rhythm.of(args)
        self.environments_pool = Environments(environment_factory) if environment_factory is not None else None
        train_dataset = self._check_data(args, train_dataset, eval_dataset)
        self._set_rewards(args, reward_funcs, reward_processing_classes)
        self.tools = [*(tools or [])]
        for environment in self.environments_pool.first_of_each if self.environments_pool else ():
            self.tools += list_methods(environment)
        self.rollout_func = rollout_func
        set_seed(args.seed)  # of new adapters
        model = load_model(model, args, quantization_config, peft_config)
        processing_class = processing_class or load_processor(model, args)
        prepare_tokenizer(processing_class, model)
        stack = ExitStack()
        weakref.finalize(self, stack.close)
        self.run_async = stack.enter_context(AsyncRunner())
        self.run = translate_run(args, self.algorithm, model, processing_class, str(args.device))
        """The run as `policygrad train` would have it; its steps are generations."""
        policy = load_policy(self.run, self.algorithm, str(args.device))
        super().__init__(
            model=policy.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.accelerator.native_amp = False  # the precision of the passes is the learner's own
        self._set_learner(policy.model, has_new_adapters=peft_config is not None)
        self._set_sampler(stack, policy, tools or [])
        self._set_counters()
        self.add_callback(_FollowUpdates(self))
        if args.sync_ref_model:
            self._follow_policy()

    def _set_sampler(self, stack: ExitStack, policy: LoadedPolicy, tools: Sequence[Callable[..., Any]]) -> None:
        options: dict[str, Any] = dict(self.args.chat_template_kwargs or {})
        self._rows = RowSampler(
            replace(policy.tokenizer, template_options=options),
            self.run.sampling,
            self.run_async,
            tools,
            self.environments_pool,
            getattr(self.args, "max_tool_calling_iterations", None),
        )
        engine = None
        if self.args.use_vllm:
            from policygrad.training.engine_setup import make_run_engine
            from policygrad.utils.progress import ignore_progress

            engine = make_run_engine(self.run, self.algorithm, policy.device, None, ignore_progress)
        self._sampler = make_sampler(stack, policy, engine, self.run, self.algorithm, self.run_async)

    def _set_counters(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._generated: Generated | None = None
        self._micro_step, self._window, self._accumulated = 0, 0, list[int]()
        self._seconds, self._eval_batches = 0.0, 0
        self.run_log: RunLog | None = None
        """The run's folder, while it trains."""
        self._completions: dict[str, list[Any]] = {}  # of the last generation
        self.entropy_coef: float = getattr(self.args, "entropy_coef", 0.0)
        self._last_entropy = math.inf
        self._entropies = list[tuple[float, float]]()

    # What is checked and made once.

    def _check_data(self, args: Any, train_dataset: Any, eval_dataset: Any) -> Any:
        """Return the training data, or rows without prompts where an environment writes them."""
        if train_dataset is None:
            if self.environments_pool is None:
                raise ValueError("`train_dataset` is required unless an `environment_factory` is provided.")
            if self.environments_pool.is_named:
                raise ValueError(
                    "a dict as `environment_factory` requires a `train_dataset` with a column `environment`, which chooses one for "
                    "each row"
                )
            if args.max_steps <= 0:
                raise ValueError("without a `train_dataset`, max_steps must say how long to train: set it above 0")
            from datasets import Dataset

            return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * self.rhythm.prompts})
        evaluated = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        if any(is_stream(data) for data in (train_dataset, *evaluated) if data is not None):
            if args.accelerator_config.dispatch_batches:
                raise ValueError(
                    "Iterable datasets require `dispatch_batches=False`, and accelerator_config sets it to True: leave it out"
                )
            args.accelerator_config.dispatch_batches = False
        if is_stream(train_dataset) and args.dataloader_num_workers:
            logger.warning("dataloader_num_workers is 0 for an iterable dataset, whose groups workers would split")
            args.dataloader_num_workers = 0
        if not is_stream(train_dataset) and len(train_dataset) < self.rhythm.prompts:
            raise ValueError(
                f"the train_dataset has {len(train_dataset)} rows, and a generation has {self.rhythm.prompts} prompts "
                f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}): lower the batch"
            )
        return train_dataset

    def _set_rewards(self, args: OnlineConfig, functions: Any, tokenizers: Any) -> None:
        loaded = load_reward_functions(functions, tokenizers, args)
        weights = args.reward_weights or [1.0] * len(loaded.functions)
        if len(weights) != len(loaded.functions):
            raise ValueError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(loaded.functions)})"
            )
        kinds = list[type]()
        for environment in self.environments_pool.first_of_each if self.environments_pool else ():
            kind = type(environment)
            if hasattr(kind, "get_reward") and kind not in kinds:
                kinds.append(kind)
                loaded.functions.append(make_reward(kind))
                loaded.names.append(kind.__name__)
                loaded.tokenizers.append(None)
                weights = [*weights, 1.0]
        if not loaded.functions:
            raise ValueError(
                "No reward source provided: give `reward_funcs`, or an `environment_factory` whose environments have `get_reward`"
            )
        self.rewards: Rewards = loaded
        self.reward_funcs, self.reward_func_names = loaded.functions, loaded.names
        self.reward_processing_classes = loaded.tokenizers
        self.reward_weights = torch.tensor(weights, dtype=torch.float32)

    def _set_learner(self, model: nn.Module, *, has_new_adapters: bool) -> None:
        run = self.run
        spec = LearnerSpec(run.algorithm, run.lr, run.steps, run.sampling.temperature, run.learner, run.optimizer)
        text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
        given, has_router = self.args.router_aux_loss_coef, hasattr(text, "output_router_logits")
        if given and not has_router:
            raise ValueError(
                f"`router_aux_loss_coef` is set to {given} but {type(model).__name__} is not a Mixture-of-Experts model that "
                "returns its router logits: leave it out"
            )
        if given is not None:
            text.router_aux_loss_coef = given
        before = getattr(text, "output_router_logits", False)
        if has_router:  # TRL balances experts whenever there is a coefficient
            text.output_router_logits = True
        self.balance_coefficient = read_balance_coefficient(model)
        self.learner = LocalLearner(model, spec)
        if has_router:
            text.output_router_logits = before
        self.aux_loss_enabled = self.balance_coefficient != 0
        if has_new_adapters and self.learner.reference is not None:  # whatever they begin with
            from policygrad.models.adapters import set_adapters_enabled

            set_adapters_enabled(self.learner.reference.model, False)
        for k, function in enumerate(self.reward_funcs):
            if isinstance(function, nn.Module):
                self.reward_funcs[k] = function.to(self.args.device).eval()

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference beside the policy; None without one, or where it is the policy without its adapters."""
        reference = self.learner.reference
        return None if reference is None or adapter_configs(self.model) else reference.model

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the last generation's rows."""
        return self.environments_pool.current if self.environments_pool else None

    @property
    def num_generations_eval(self) -> int:
        """Completions per prompt in evaluations."""
        return int(self.args.num_generations_eval or self.args.num_generations)

    def _follow_policy(self) -> None:
        if self.args.beta == 0:
            raise ValueError("sync_ref_model=True has no reference to move while beta=0: leave it out, or set beta")
        if self.ref_model is None:
            raise NotImplementedError(
                "sync_ref_model=True needs a reference of its own, and with adapters it is the model without them: leave it out"
            )
        self.add_callback(_MoveReference(self))

    def __getattr__(self, name: str) -> Any:
        if name in _PUBLIC:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, which is private in TRL: instead, use {_PUBLIC[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Data.

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Return the rows of a generation, once for each of its micro-batches."""
        rhythm = self.rhythm
        return make_loader(
            self._select_columns(self.train_dataset),
            batch_size=rhythm.rows * rhythm.per_generation,
            samples=rhythm.samples,
            prompts=rhythm.prompts,
            repeats=rhythm.micro_batches,
            shuffle=bool(self.args.shuffle_dataset),
            seed=self.args.seed,
            num_workers=self.args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Row]:
        """Return the rows of an evaluation, each `num_generations_eval` times."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if eval_dataset is None:
            raise ValueError("evaluation requires an eval_dataset: give one to the trainer, or to evaluate()")
        return make_loader(
            self._select_columns(eval_dataset),
            batch_size=self.args.eval_batch_size,
            samples=self.num_generations_eval,
            shuffle=True,
            seed=self.args.seed,
            num_workers=self.args.dataloader_num_workers,
        )

    def _select_columns(self, dataset: Any) -> Any:
        names = getattr(dataset, "column_names", None)
        if not self.args.remove_unused_columns or not names:
            return dataset
        return dataset.remove_columns([name for name in names if name not in ("prompt", "image", "images")])

    # Training.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Go on by one micro-batch: sample when a generation begins, and add the gradient when the last of an optimizer step, or of
        the generation, has come. The micro-batches of a step are read together.

        Returns:
            The loss of what was added; 0 where nothing was.
        """
        started = time.perf_counter()
        self.model.eval()  # no dropout: the ratio of an unchanged policy is 1
        rhythm = self.rhythm
        if self._generated is None or self._micro_step % rhythm.micro_batches == 0:
            key = (self.args.seed, TRAIN, self.state.global_step * rhythm.accumulation + self._window)
            self._generated = self._generate(inputs, rhythm.samples, key, "train")
            self._accumulated = []
        self._accumulated.append(self._micro_step % rhythm.per_generation)
        self._micro_step, self._window = self._micro_step + 1, self._window + 1
        is_last = self._window >= self.current_gradient_accumulation_steps
        loss = 0.0
        if is_last or self._micro_step % rhythm.micro_batches == 0:
            loss = self._accumulate(self._generated, self._accumulated, self.current_gradient_accumulation_steps)
            self._accumulated = []
        self._seconds += time.perf_counter() - started
        if is_last:
            self._window = 0
            self._add("train", {"step_time": self._seconds})
            self._seconds = 0.0
        return torch.tensor(loss, device=self.args.device)

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        """Refuse: the loss is the algorithm's, and its gradient is added by `training_step`."""
        raise NotImplementedError(
            "compute_loss is not called here: the loss is run.algorithm. Give a part of your own to it, or use policygrad.Trainer"
        )

    def _accumulate(self, generated: Generated, indices: Sequence[int], count: int) -> float:
        """Add the gradient of some micro-batches of an optimizer step, and return their loss."""
        size = self.rhythm.rows
        started = time.perf_counter()
        rows = torch.cat([generated.order[i * size : (i + 1) * size] for i in indices])
        algorithm = self._algorithm_of_step(generated, size, count)
        batch = generated.batch.select(rows)
        problem = self.learner.build_problem(batch, generated.psi[rows], algorithm)
        metrics = problem.accumulate()
        self._fill_gradients()
        loss = -_value(metrics, "objective", 0.0)
        self._add("train", self._describe_update(metrics, batch, loss, count))
        if self.run_log is not None:
            self.run_log.add_update(metrics, time.perf_counter() - started, lr=self._get_learning_rate())
        return loss + self.balance_coefficient * _value(metrics, "router_aux_loss", 0.0)

    def _algorithm_of_step(self, generated: Generated, rows: int, count: int, *, is_eval: bool = False) -> Algorithm:
        share = 1.0 if is_eval else count / self.rhythm.per_generation
        return with_micro_batches(
            self.algorithm,
            self.args,
            rows=rows,
            count=count,
            num_tokens=max(1.0, generated.num_tokens) * share,
            entropy_coef=self._active_entropy_coef,
        )

    @property
    def _active_entropy_coef(self) -> float:
        adapts = getattr(self.args, "use_adaptive_entropy", False)
        return 0.0 if adapts and self._last_entropy > self.args.entropy_target else self.entropy_coef

    def _fill_gradients(self) -> None:
        """Give a gradient of 0 to weights that have none, if no completion had any: optimizers go on with their momentum, as they
        do where a loss is 0."""
        masters = self.learner.optimizer.masters
        if any(p.grad is not None for p in masters.values()):
            return
        for p in masters.values():
            p.grad = torch.zeros_like(p)

    def _describe_update(self, metrics: Metrics, batch: Batch, loss: float, count: int) -> dict[str, float]:
        """Return TRL's names of what an update has measured."""
        values = dict[str, float]()
        names = {"kl": "kl", "router_aux_loss": "aux_loss"}
        if self.args.use_vllm:
            names |= {f"mismatch/logp_{kind}": f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")}
        for ours, theirs in names.items():
            if ours in metrics:
                values[theirs] = float(metrics[ours].value)
        low, high = _value(metrics, "clip_ratio/low", 0.0), _value(metrics, "clip_ratio/high", 0.0)
        if getattr(self.args, "loss_type", "") == "cispo":
            values["cispo_clip_ratio"] = high
        elif "clip_ratio/low" in metrics:
            values |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        if "entropy/exact" in metrics:
            entropy = float(metrics["entropy/exact"].value)
            values |= {"entropy": entropy}
            if any(type(term).__name__.endswith("Entropy") for term in self.algorithm.terms):
                values |= self._follow_entropy(entropy, float(batch.mask.sum()), loss, count)
        elif batch.logp_sampler is not None and batch.mask.any() and not self._uses_generate:
            values["entropy"] = -float(masked.mean(batch.logp_sampler, batch.mask))
        return values

    def _follow_entropy(self, entropy: float, tokens: float, loss: float, count: int) -> dict[str, float]:
        """Adapt the coefficient of the entropy bonus after an optimizer step. Source: TRL 1.16, `_compute_loss`."""
        args, used = self.args, self._active_entropy_coef
        values = {"policy_loss": loss + used * entropy} if args.top_entropy_quantile == 1 else {}
        self._entropies.append((entropy, tokens))
        if self._window >= count:
            if args.use_adaptive_entropy:
                total = sum(n for _, n in self._entropies)
                self._last_entropy = sum(h * n for h, n in self._entropies) / max(total, 1.0)
                is_low = self._last_entropy <= args.entropy_target
                step = args.entropy_coef_delta if is_low else -args.entropy_coef_delta
                self.entropy_coef = min(max(self.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
            self._entropies = []
            values["entropy_coef"] = self.entropy_coef
        return values

    # Generations.

    @property
    def _uses_generate(self) -> bool:
        args = self.args
        return (
            bool(
                replaces_generate(self.model)
                or args.generation_kwargs
                or args.min_p is not None
                or args.repetition_penalty != 1
            )
            and not args.use_vllm
        )

    def _choose_sampler(self) -> Sampler:
        if not self._uses_generate:
            return self._sampler
        args, tokenizer = self.args, self._rows.tokenizer
        options: dict[str, Any] = {"repetition_penalty": args.repetition_penalty, "min_p": args.min_p}
        options |= {"top_p": args.top_p, "top_k": args.top_k}
        options |= {"cache_implementation": args.cache_implementation, "bos_token_id": tokenizer.hf.bos_token_id}
        return GenerateSampler(
            self.model, sorted(tokenizer.end_ids), pad_token_id(tokenizer), options | dict(args.generation_kwargs or {})
        )

    def _generate(self, rows: list[Row], samples: int, key: tuple[int, int, int], mode: str) -> Generated:
        """Sample, score and compare the completions of some rows."""
        started, sampler = time.perf_counter(), self._choose_sampler()
        self.run_async(sampler.update(self.learner.publish()))
        if self.rollout_func is None:
            sampled = self._rows.sample(rows, samples, sampler, key)
        else:
            prompts = [row["prompt"] for row in rows]
            sampled = self._rows.from_rollout(rows, self.rollout_func(prompts, self))
        if isinstance(sampler, LendsMemory):
            self.run_async(sampler.lend_memory())
        self._add(mode, self._describe_lengths(sampled, mode))
        log = RewardLog()
        extra: dict[str, Any] = {"trainer_state": self.state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        if self.environments is not None:
            extra["environments"] = self.environments
        values = self.rewards.score(
            sampled.rows, sampled.prompts, sampled.completions, sampled.completion_ids, extra, self.run_async
        )
        self._add(mode, {name: sum(each) / len(each) for name, each in log.metrics.items()})
        batch, psi, scored = self._compare(sampled, values, samples)
        self._warn_unscored(sampled, scored)
        scores = self._describe_rewards(values, scored, samples)
        self._add(mode, scores)
        if mode == "train" and self.run_log is not None:
            self.run_log.begin(sampled, batch, psi, scores, samples, time.perf_counter() - started)
        if mode == "train":
            advantages = masked.first_valid(psi, batch.mask).tolist()
            self._keep_completions(sampled, values, advantages, log)
        order = torch.arange(len(rows)) if mode == "eval" else self._shuffle(len(rows), key[2])
        return Generated(batch, psi, order, float(batch.mask.sum()))

    def _compare(self, sampled: SampledRows, values: Tensor, samples: int) -> tuple[Batch, Tensor, Tensor]:
        """Return the batch to learn from, Ψ [B, T], and which completions have a reward [B]."""
        total, scored = sum_rewards(values, self.reward_weights)
        bounds = getattr(self.args, "reward_clip_range", None)
        names, weights = tuple(self.reward_func_names), tuple(self.reward_weights.tolist())
        batch = replace(
            sampled.batch,
            reward=total if bounds is None else total.clamp(*bounds),
            rewards=values,
            reward_names=names,
            reward_weights=weights,
            in_statistics=scored,
        )
        algorithm, complete = self.algorithm, batch.mask
        batch = algorithm.apply_filters(batch)
        needs = algorithm.needs
        reads_sampler = getattr(self.args, "off_policy_mask_threshold", None) is not None and not self.args.use_vllm
        batch = self.learner.evaluate(batch, needs | {"logp_old"} if reads_sampler else needs)
        if reads_sampler:
            batch = replace(batch, logp_sampler=batch.logp_old)
        # Completions are compared before truncated ones are masked: their rewards count, and π_old's KL of theirs does not.
        compared = replace(batch, group=torch.arange(len(complete)) // samples)
        shaped = replace(algorithm.shape_rewards(compared), mask=complete)
        psi = algorithm.compute_advantages(replace(compared, mask=complete), shaped)
        return batch, masked.apply_mask(psi, batch.mask & scored[:, None]), scored

    def _shuffle(self, size: int, number: int) -> Tensor:
        """Return the order in which a generation's completions are divided into micro-batches."""
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + number)
        return torch.randperm(size, generator=generator)

    # Logs.

    def _add(self, mode: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._values[mode][name].append(float(value))

    def _describe_lengths(self, sampled: SampledRows, mode: str) -> dict[str, float]:
        lengths, ended = sampled.batch.mask.sum(1).float(), ~sampled.batch.truncated  # type: ignore[operator]
        if mode == "train":
            self.state.num_input_tokens_seen += sum(sampled.prompt_lengths) + int(lengths.sum())
        self._values[mode]["num_tokens"] = [float(self.state.num_input_tokens_seen)]
        complete = lengths[ended] if bool(ended.any()) else torch.zeros(1)
        described = {"completions/clipped_ratio": 1 - float(ended.float().mean())}
        for name, x in {"": lengths, "terminated_": complete}.items():
            described |= {
                f"completions/mean_{name}length": float(x.mean()),
                f"completions/min_{name}length": float(x.min()),
                f"completions/max_{name}length": float(x.max()),
            }
        if self.tools:
            calls, failed = sampled.num_calls, sampled.num_failed_calls
            described |= {
                "tools/call_frequency": calls / len(lengths),
                "tools/failure_frequency": failed / max(1, calls),
            }
        return described

    def _describe_rewards(self, values: Tensor, scored: Tensor, samples: int) -> dict[str, float]:
        total, _ = sum_rewards(values, self.reward_weights)
        described = dict[str, float]()
        for k, name in enumerate(self.reward_func_names):
            given = values[:, k][~values[:, k].isnan()]
            described |= {f"rewards/{name}/mean": _mean(given), f"rewards/{name}/std": _std(given)}
        groups = Groups(torch.arange(len(total)) // samples, scored)
        described |= {
            "reward": _mean(total[scored]),
            "reward_std": _std(total[scored]),
            "frac_reward_zero_std": float(groups.is_constant(total).float().mean()),
        }
        return described

    def _warn_unscored(self, sampled: SampledRows, scored: Tensor) -> None:
        if bool(scored.all()):
            return
        row = int((~scored).nonzero()[0])
        given = {**sampled.rows[row], "prompt": sampled.prompts[row], "completion": sampled.completions[row]}
        logger.warning(
            f"All reward functions returned None for the following kwargs:\n{given}\nAt least one must return a number for each "
            "completion that is to be learned from."
        )

    def _keep_completions(
        self, sampled: SampledRows, values: Tensor, advantages: Sequence[float], log: RewardLog
    ) -> None:
        if not self.args.log_completions:
            return
        table: dict[str, list[Any]] = {"prompt": sampled.prompts, "completion": sampled.completions}
        table |= {name: values[:, k].tolist() for k, name in enumerate(self.reward_func_names)}
        table |= {name: column for name, column in log.columns.items() if len(column) == len(advantages)}
        self._completions = table | {"advantage": list(advantages)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what has been measured since the last time, averaged, beside what transformers logs."""
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        prefix = "eval_" if mode == "eval" else ""
        for name, values in self._values[mode].items():
            known = [value for value in values if not math.isnan(value)]
            logs[prefix + name] = sum(known) / len(known) if known else None  # type: ignore[assignment]
        self._values[mode].clear()
        super().log(logs, start_time)
        if mode == "train" and self._completions:
            from policygrad.trl.tables import write_completions

            write_completions(self._completions, Path(self.args.output_dir), self.state.global_step, self.args)
            self._completions = {}

    # Evaluation.

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Sample and score a batch of an evaluation, and return its loss."""
        samples = self.num_generations_eval
        self._eval_batches += 1
        key = (self.args.seed, EVALUATE, self._eval_batches)
        generated = self._generate(inputs, samples, key, "eval")
        algorithm = self._algorithm_of_step(generated, len(generated.psi), 1, is_eval=True)
        problem = self.learner.build_problem(generated.batch, generated.psi, algorithm)
        with torch.no_grad():
            metrics = problem.accumulate_policy(learning=False)
        loss = -_value(metrics, "objective", 0.0)
        self._add("eval", {"kl": _value(metrics, "kl", 0.0)} if "kl" in metrics else {})
        return torch.tensor(loss, device=self.args.device), None, None

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the eval_dataset, with the same random numbers every time."""
        self._eval_batches = 0
        result: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
        return result

    # Optimizer. A bf16 model has fp32 masters, which are what is stepped, clipped and saved.

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, of the masters where the model's own weights are copies of them."""
        optimizer = super().create_optimizer()
        masters, parameters = self.learner.optimizer.masters, self.learner.optimizer.parameters
        kept = {parameters[name]: master for name, master in masters.items()}
        for group in optimizer.param_groups:
            group["params"] = [kept.get(p, p) for p in group["params"]]
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Tensor:
        masters = list(self.learner.optimizer.masters.values())
        return nn.utils.clip_grad_norm_(masters, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if norm is not None and not math.isfinite(float(norm)):
            raise NumericsError(
                f"the gradient's norm is {float(norm)} at optimizer step {self.state.global_step + 1}: the weights are unchanged. "
                "Lower learning_rate or max_grad_norm, and look at the rewards of this step; resume_from_checkpoint=True goes on "
                "from the last checkpoint"
            )
        return norm

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        given, self.processing_class = (
            self.processing_class,
            self._rows.tokenizer,
        )  # which writes a processor's files whole
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.processing_class = given

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        state = {"entropy_coef": self.entropy_coef, "last_entropy": self._last_entropy}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        optimizer = self.learner.optimizer
        copies = {n: m.detach() for n, m in optimizer.masters.items() if m is not optimizer.parameters[n]}
        if copies and not self.args.save_only_model:
            save_file(copies, folder / MASTERS)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), self.learner.optimizer
        if (folder / STATE).is_file():
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            self.entropy_coef, self._last_entropy = state["entropy_coef"], state["last_entropy"]
        saved = load_file(folder / MASTERS) if (folder / MASTERS).is_file() else {}
        with torch.no_grad():
            for name, master in optimizer.masters.items():
                if master is not optimizer.parameters[name]:
                    master.copy_(saved.get(name, optimizer.parameters[name]))

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        """Refuse: nothing is uploaded from here."""
        raise NotImplementedError(
            "push_to_hub is not done here: save_model(folder) writes the model, and `hf upload REPOSITORY folder` uploads it"
        )


class GRPOTrainer(OnlineTrainer):
    """TRL's `GRPOTrainer`: the same arguments, fields and numbers. See docs/from-other-libraries.md."""

    kind, config_class = "GRPO", GRPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: GRPOConfig = self.args
        if is_length_weighted(config):
            logger.warning(
                f"importance_sampling_level='sequence' with loss_type={config.loss_type!r} weights each sequence by its completion "
                "length, since the loss is a sum over tokens: set loss_type='grpo' for GSPO's objective"
            )

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """Return [B, 1], 0 for completions with a negative advantage whose mean log(μ/π_θ) is above the threshold, else 1."""
        gap = torch.nan_to_num(sampling_per_token_logps - per_token_logps.detach(), nan=0.0) * mask
        mean = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
        return ((advantages >= 0) | (mean <= off_policy_threshold)).to(mask.dtype)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return [B, T] bool, the tokens of `mask` whose entropy is at or above the quantile `threshold` of theirs."""
        counted = mask.bool()
        if not counted.any():
            return torch.zeros_like(counted)
        return counted & (entropies >= torch.quantile(entropies[counted].float(), threshold))


class RLOOTrainer(OnlineTrainer):
    """TRL's `RLOOTrainer`: the same arguments, fields and numbers. See docs/from-other-libraries.md."""

    kind, config_class = "RLOO", RLOOConfig


class _FollowUpdates(TrainerCallback):
    """Tells the learner of optimizer steps, and the trainer where a resumed run goes on."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, loader = self.trainer, self.trainer.callback_handler.train_dataloader
        accumulation, done = trainer.rhythm.accumulation, state.global_step
        if loader is not None and not is_stream(trainer.train_dataset):
            done %= max(1, -(-len(loader) // accumulation))
        trainer._micro_step, trainer._window = done * accumulation, 0
        trainer._generated = None
        generations = state.global_step * accumulation // trainer.rhythm.micro_batches
        trainer.run_log = RunLog(Path(args.output_dir), trainer.run, generations)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.run_log is not None:
            self.trainer.run_log.end()
            self.trainer.run_log.files.close()
            self.trainer.run_log = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        optimizer = self.trainer.learner.optimizer
        optimizer.sync_to_model()
        optimizer.clear_gradients()
        optimizer.num_updates += 1


class _MoveReference(TrainerCallback):
    """Moves the reference towards the policy every `ref_model_sync_steps` optimizer steps."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self.trainer = trainer

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reference = self.trainer.ref_model
        if reference is None or state.global_step % args.ref_model_sync_steps:
            return
        for moved, policy in zip(reference.parameters(), self.trainer.model.parameters(), strict=True):
            moved.lerp_(policy.to(moved), args.ref_model_mixup_alpha)


def _value(metrics: Metrics, name: str, default: float) -> float:
    return float(metrics[name].value) if name in metrics else default


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else math.nan


def _std(x: Tensor) -> float:
    return float(x.std()) if len(x) > 1 else math.nan if not len(x) else 0.0
