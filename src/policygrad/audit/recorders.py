"""Record one update of a trainer of another library while it trains, without editing it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from policygrad.audit.recording import record
from policygrad.errors import ConfigError

_TRL_METHODS = (
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_calculate_rewards",
)
_TRL_SETTINGS = (
    "loss_type beta epsilon epsilon_high delta max_completion_length num_generations scale_rewards importance_sampling_level "
    "temperature gradient_accumulation_steps steps_per_generation num_iterations multi_objective_aggregation reward_weights "
    "sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
    "vllm_importance_sampling_cap mask_truncated_completions"
)
_TRL_FIELDS = {
    "completion_mask": "mask",
    "completion_ids": "tokens",
    "advantages": "advantage",
    "old_per_token_logps": "logp_old",
    "ref_per_token_logps": "logp_ref",
    "sampling_per_token_logps": "logp_sampler",
}
_PREFIX = "policygrad_"  # of what this adds to TRL's own batches


class Recorder:
    """Collects the micro-batches of one optimizer update and writes them to a file."""

    def __init__(self, path: str | Path, step: int = 1) -> None:
        if step < 1:
            raise ConfigError(f"step={step} must be at least 1, the first update")
        self.file, self.step = Path(path), step
        self.updates = 0
        self.settings: dict[str, Any] = {}
        self._written: Path | None = None
        self._parts: list[dict[str, Tensor]] = []
        self.rollouts: list[dict[str, Tensor]] = []
        """Rewards, groups and advantages of each rollout so far."""

    @property
    def path(self) -> Path:
        """The file; RuntimeError until the update was recorded."""
        if self._written is None:
            raise RuntimeError(
                f"nothing was recorded: {self.updates} updates ended and update {self.step} is to be recorded"
            )
        return self._written

    @property
    def wants_update(self) -> bool:
        """True during the update that is recorded."""
        return self._written is None and self.updates == self.step - 1

    def add(self, part: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Add a micro-batch; its `logp` gets a hook that stores the gradient of backward."""
        logp = part["logp"]
        assert logp is not None
        stored = {name: value.detach().clone() for name, value in part.items() if isinstance(value, Tensor)}
        if logp.requires_grad:
            stored["gradient"] = torch.zeros_like(stored["logp"])

            def store(gradient: Tensor) -> None:
                stored["gradient"] = stored["gradient"] + gradient.detach()

            logp.register_hook(store)  # type: ignore[no-untyped-call]
        self._parts.append(stored)
        return stored

    def end_update(self) -> None:
        """End an update: write the file if it is the one to record."""
        if self.wants_update and self._parts:
            self._written = record(self.file, self.settings, **self._join())
        self._parts = []
        self.updates += 1

    def _join(self) -> dict[str, Tensor]:
        names = set[str].intersection(*(set(part) for part in self._parts))
        width = max(part["mask"].shape[1] for part in self._parts)
        tensors = dict[str, Tensor]()
        for name in names:
            values = [part[name].cpu() for part in self._parts]
            if name == "loss":
                tensors[name] = torch.stack([value.double() for value in values]).sum()
                continue
            per_token = values[0].ndim == 2 and values[0].shape == self._parts[0]["mask"].shape
            tensors[name] = torch.cat([_pad(x, width) if per_token else x for x in values])
        sizes = torch.tensor([len(part["mask"]) for part in self._parts])
        tensors["micro_batch"] = torch.arange(len(sizes)).repeat_interleave(sizes)
        if (generation := tensors.pop("generation", None)) is not None:
            self._add_rollouts(tensors, generation)
        return tensors

    def _add_rollouts(self, tensors: dict[str, Tensor], generation: Tensor) -> None:
        """Add the rollouts that the update's completions came from; each has prompts of its own."""
        numbers = torch.unique(generation).tolist()
        used = [self.rollouts[number] for number in numbers]
        if len(used[0]["advantage"]) != len(used[0]["reward"]):  # one process of several: its advantages are a part
            return
        first = torch.tensor([0, *(int(rollout["group"].max()) + 1 for rollout in used[:-1])]).cumsum(0)
        for name in used[0]:
            values = [
                rollout[name].cpu() + (offset if name == "group" else 0)
                for rollout, offset in zip(used, first, strict=True)
            ]
            tensors[f"rollout_{name}"] = torch.cat(values)
        if "group" in tensors:
            tensors["group"] = tensors["group"] + first[torch.searchsorted(torch.tensor(numbers), generation)]


def _pad(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


def trl(trainer: Any, path: str | Path = "audit.safetensors", step: int = 1) -> Recorder:
    """Record an update of TRL's GRPOTrainer: `recorder = policygrad.audit.trl(trainer); trainer.train(); recorder.path`.

    Its methods are wrapped on this one object: what `_compute_loss` receives and returns is stored, with the gradient that reaches
    the log-probabilities in backward, and all rewards of the rollout. With several processes each writes a file, and
    `policygrad audit FILE FILE …` reads them together.

    Args:
        step: the optimizer update to record, counted from 1. A later update of a rollout has ratios other than 1.

    Raises:
        ConfigError: a trainer without the methods of GRPOTrainer.
    """
    methods = _find_trl_methods(trainer)
    from transformers import TrainerCallback

    path = Path(path)
    if trainer.accelerator.num_processes > 1:
        path = path.with_stem(f"{path.stem}-{int(trainer.accelerator.process_index)}")
    recorder = Recorder(path, step)
    recorder.settings = _read_trl_settings(trainer)

    class EndOfUpdate(TrainerCallback):
        """Tells the recorder when an optimizer update has ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.end_update()

    for name, function in _TrlWrappers(trainer, recorder, methods).by_name().items():
        setattr(trainer, name, functools.wraps(methods[name])(functools.partial(function)))
    trainer.add_callback(EndOfUpdate)
    return recorder


def _find_trl_methods(trainer: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that are wrapped, by name. Raises ConfigError for a trainer without them."""
    missing = [name for name in _TRL_METHODS if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"audit.trl records TRL's GRPOTrainer, and {type(trainer).__name__} has no {', '.join(missing)}: use "
            "policygrad.audit.record in the loop instead"
        )
    return {name: getattr(trainer, name) for name in _TRL_METHODS}


def _read_trl_settings(trainer: Any) -> dict[str, Any]:
    """Return the trainer's settings that the audit reads."""
    settings = {name: getattr(trainer.args, name, None) for name in _TRL_SETTINGS.split()}
    settings |= {"num_processes": trainer.accelerator.num_processes, "trainer": f"trl {version('trl')}"}
    settings["epsilon_high"] = getattr(trainer, "epsilon_high", settings["epsilon_high"])  # None means epsilon
    return {name: value for name, value in settings.items() if isinstance(value, int | float | str | list)}


class _TrlWrappers:
    """TRL's methods, with a look at what passes through them.

    Rewards are calculated while a rollout is generated, and log-probabilities while the loss is computed: each is kept until then.
    """

    def __init__(self, trainer: Any, recorder: Recorder, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._trainer, self._recorder, self._methods = trainer, recorder, methods
        self._rank = int(trainer.accelerator.process_index)
        self._columns: Tensor | None = None
        self._logp: Tensor | None = None
        self._computes_loss = False

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Return what takes the place of each method."""
        functions = (self.compute_loss, self.get_logps, self.generate, self.calculate_rewards)
        return dict(zip(_TRL_METHODS, functions, strict=True))

    def calculate_rewards(self, *arguments: Any, **options: Any) -> Any:
        """Keep the rewards, a column for each function."""
        self._columns = self._methods["_calculate_rewards"](*arguments, **options)
        return self._columns

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Add the rollout to the recorder, and its rewards and groups to the batch, which TRL shuffles and splits."""
        output = self._methods["_generate_and_score_completions"](*arguments, **options)
        assert self._columns is not None
        columns = self._columns.detach()
        weights = getattr(self._trainer, "reward_weights", torch.ones(columns.shape[1])).to(columns.device)
        total = (columns * weights).nansum(1)
        group = torch.arange(len(total), device=total.device) // self._trainer.num_generations
        rows = len(output["advantages"])
        start = self._rank * rows
        mine = slice(start, start + rows)
        output[f"{_PREFIX}reward"], output[f"{_PREFIX}group"] = total[mine], group[mine]
        output[f"{_PREFIX}rewards"] = columns[mine]
        generation = len(self._recorder.rollouts)
        output[f"{_PREFIX}generation"] = torch.full_like(group[mine], generation)
        self._recorder.rollouts.append(
            {
                "reward": total.clone(),
                "group": group.clone(),
                "advantage": output["advantages"].clone(),
                "rewards": columns.clone(),
            }
        )
        return output

    def get_logps(self, *arguments: Any, **options: Any) -> Any:
        """Keep the log-probabilities of the loss."""
        result = self._methods["_get_per_token_logps_and_entropies"](*arguments, **options)
        if self._computes_loss:
            self._logp = result[0] if isinstance(result, tuple) else result
        return result

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Record a micro-batch of the update that is recorded."""
        compute_loss = self._methods["_compute_loss"]
        if not (self._recorder.wants_update and self._trainer.model.training):
            return compute_loss(model, inputs)
        self._computes_loss = True
        try:
            loss = compute_loss(model, inputs)
        finally:
            self._computes_loss = False
        part: dict[str, Tensor | None] = {ours: inputs.get(theirs) for theirs, ours in _TRL_FIELDS.items()}
        for name in ("reward", "group", "rewards", "generation"):
            part[name] = inputs.get(f"{_PREFIX}{name}")
        if inputs.get("tool_mask") is not None:
            part["mask"] = inputs["completion_mask"] * inputs["tool_mask"]
        part["logp"], self._logp = self._logp, None
        part["loss"] = loss
        if isinstance(items := inputs.get("num_items_in_batch"), Tensor):
            part["generation_tokens"] = items.expand(len(inputs["advantages"]))
        self._recorder.add(part)
        return loss


class VerlRecorder(Recorder):
    """A recorder of verl's policy losses; a context manager that ends the update."""

    def __init__(self, path: str | Path, module: ModuleType, name: str) -> None:
        super().__init__(path)
        self._registry: dict[str, Callable[..., Any]] = module.POLICY_LOSS_REGISTRY
        self._name, self._plain = name, self._registry[name]
        with suppress(PackageNotFoundError):
            self.settings["trainer"] = f"verl {version('verl')}"
        self._registry[name] = self._wrap(self._plain)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def compute_and_record(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            **options: Any,
        ) -> Any:
            if not log_prob.requires_grad:
                return function(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **options)
            tensors = {"mask": response_mask, "logp": log_prob, "logp_old": old_log_prob, "advantage": advantages}
            stored = self.add(tensors)
            result = function(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **options)
            stored["loss"] = (result[0] if isinstance(result, tuple) else result).detach().clone()
            for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "kl_loss_coef"):
                value = getattr(config, name, None)
                if isinstance(value, int | float):
                    self.settings[name] = value
            self.settings["loss_agg_mode"] = loss_agg_mode
            return result

        return compute_and_record

    def __enter__(self) -> VerlRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the micro-batches since the start as one update, and restore verl's function."""
        self._registry[self._name] = self._plain
        if len(self._parts) > 1:  # the actor scales each before backward, which only the gradient shows
            for part in self._parts:
                part.pop("loss", None)
        self.end_update()


def verl(path: str | Path = "audit.safetensors", loss: str = "vanilla") -> VerlRecorder:
    """Record verl's policy loss: `with policygrad.audit.verl("update.safetensors"): actor.update_policy(batch)`.

    The loss function is wrapped in verl's registry, in this process: call it in the worker that holds the actor, around one
    update. Each call is a micro-batch. Rewards are in verl's driver process; without them the advantages are not checked.

    Args:
        loss: the name of the policy loss in verl, its `policy_loss.loss_mode`.
    """
    name = "verl.trainer.ppo.core_algos"
    try:
        module = sys.modules.get(name) or import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"audit.verl needs verl, which cannot be imported: {error}; call it in verl's environment"
        ) from error
    registry = getattr(module, "POLICY_LOSS_REGISTRY", None)
    if not isinstance(registry, dict) or loss not in registry:
        listed = ", ".join(registry or {}) or "none: this verl has no registry of losses (before 0.5)"
        raise ConfigError(f"audit.verl: loss={loss!r} is not in verl's registry; it has {listed}")
    return VerlRecorder(path, module, loss)
