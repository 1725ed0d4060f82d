"""`policygrad lab control`: the library's algorithms on Gymnasium environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from policygrad.commands.describe import about_command
from policygrad.commands.options import writable, write
from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.lab.control.presets import Settings, preset, with_gamma
from policygrad.trackers import RunInfo, Tracker, Trackers
from policygrad.training.config.checks import check_seed
from policygrad.training.config.run import optional

if TYPE_CHECKING:
    from policygrad.lab.control.train import FreshEpisodes, Update

LINES = 150
"""Progress lines of a run, at most."""


@dataclass(frozen=True)
class ControlOptions:
    """Trains a small policy on a Gymnasium environment with the library's own gates, advantages, critic and steps."""

    env: str = "CartPole-v1"
    """The environment's name in Gymnasium's registry; MODULE:NAME imports the module first."""
    algorithm: str = "ppo"
    """ppo, trpo, a2c or reinforce; also ppo_penalty and natural."""
    steps: int = 150_000
    """Environment steps, of all environments together."""
    seed: int = 0
    """Of weights, actions and environments: the same seed, the same run."""
    num_envs: Annotated[int | None, optional("N", "the algorithm's own: 8")] = None
    """Environments stepped together."""
    rollout: Annotated[int | None, optional("STEPS", "the algorithm's own")] = None
    """Steps of each environment per rollout."""
    lr: Annotated[float | None, optional("RATE", "the algorithm's own")] = None
    """The policy's learning rate to begin with; it falls to 0 along a line."""
    gamma: Annotated[float | None, optional("GAMMA", "the algorithm's own: 0.99")] = None
    """The discount γ of advantages and of the critic's targets."""
    normalise: bool = False
    """Normalise observations by the mean and standard deviation of what was seen so far."""
    max_episode_steps: Annotated[int | None, optional("STEPS", "the environment's own")] = None
    """Another time limit."""
    episodes: int = 100
    """Fresh episodes of the final evaluation."""
    greedy: bool = False
    """Evaluate the most probable actions; without it, actions drawn from the policy."""
    json: bool = False
    """Print one JSON object instead of lines: settings, training curve and evaluation."""
    output: Annotated[Path | None, optional("FILE", "not written")] = None
    """Write that object to a file."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("steps", "episodes", "num_envs", "rollout", "max_episode_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def control(args: list[str]) -> int:
    """`policygrad lab control`."""
    options = tyro.cli(
        ControlOptions,
        args=args,
        prog="policygrad lab control",
        description=about_command(ControlOptions),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    algorithm, settings = chosen(options)
    if options.output is not None:
        writable(options.output, "--output")
    from policygrad.lab.control.environments import GymEnvironments
    from policygrad.lab.control.train import evaluate, train

    environments = GymEnvironments(options.env, settings.environments, options.max_episode_steps)
    title = f"{algorithm.name} on {options.env}: {options.steps} steps in {settings.environments} environments"
    with Trackers([] if options.json else [ControlLines()]) as trackers:
        trackers.start(
            RunInfo(title, algorithm.equation(), options.steps, unit="environment step", config=asdict(settings))
        )
        watch = lambda update: trackers.log(update.steps, measured(update))  # noqa: E731
        trained = train(environments, algorithm, settings, steps=options.steps, seed=options.seed, watch=watch)
        fresh = GymEnvironments(options.env, min(10, options.episodes), options.max_episode_steps)
        found = evaluate(trained.learner, fresh, options.episodes, seed=options.seed + 1_000_003, greedy=options.greedy)
        trackers.finish({f"mean return of {len(found.returns)} fresh episodes": _evaluated(found)})
    record: dict[str, Any] = {
        "env": options.env,
        "algorithm": algorithm.name,
        "equation": dict(algorithm.equation()),
        "settings": asdict(settings),
        "seed": options.seed,
        "steps": options.steps,
        "curve": [asdict(update) for update in trained.curve],
        "evaluation": found.to_dict(),
    }
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
    if options.output is not None:
        write(options.output, json.dumps(record, ensure_ascii=False) + "\n", "--output")
    return 0


def chosen(options: ControlOptions) -> tuple[Algorithm, Settings]:
    """The algorithm's preset with what the options change.

    Raises:
        ConfigError: a learning rate where none is used; an algorithm that is not one of those here; a γ where nothing discounts.
    """
    found = preset(options.algorithm)
    algorithm, settings = found.algorithm, found.settings
    if options.lr is not None and not algorithm.step.uses_lr:
        raise ConfigError(
            f"--lr: {algorithm.name} sets its step's length by a KL, not by a learning rate: leave it out"
        )
    changes: dict[str, Any] = {"environments": options.num_envs, "rollout": options.rollout, "lr": options.lr}
    settings = replace(settings, normalise=options.normalise, **{n: v for n, v in changes.items() if v is not None})
    return algorithm if options.gamma is None else with_gamma(algorithm, options.gamma), settings


def measured(u: Update) -> dict[str, float]:
    """An update as metrics, for trackers."""
    values = {
        "return": u.mean_return,
        "entropy": u.entropy,
        "kl": u.kl,
        "explained_variance": u.explained_variance,
        "steps_per_second": u.steps / max(u.seconds, 1e-9),
        "updates/taken": None if u.accepted is None else float(u.accepted),
    }
    return {name: value for name, value in values.items() if value is not None}


class ControlLines(Tracker):
    """A line per update, or per so many of them that there are not too many."""

    def start(self, info: RunInfo) -> None:
        self.steps, self.next_line = info.steps, 0.0
        for line in (info.title, *(f"  {symbol:6} {formula}" for symbol, formula in info.facts.items())):
            print(line, flush=True)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        if step < min(self.next_line, self.steps):
            return
        self.next_line = step + self.steps / LINES * 0.99
        found = f"return {metrics['return']:8.2f}" if "return" in metrics else "no episode yet"
        said = f"{step:8d}  {found}  entropy {metrics['entropy']:6.3f}  kl {metrics['kl']:.5f}"
        if "explained_variance" in metrics:
            said += f"  explained {metrics['explained_variance']:6.3f}"
        refused = "  no step taken" * (metrics.get("updates/taken") == 0)
        print(f"{said}  {metrics['steps_per_second']:6.0f} steps/s{refused}", flush=True)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)

    def finish(self, summary: Mapping[str, str]) -> None:
        for name, value in summary.items():
            print(f"{name}: {value}", flush=True)


def _evaluated(found: FreshEpisodes) -> str:
    error = "" if found.error is None else f" ± {found.error:.2f} (standard error)"
    policy = "the most probable actions" if found.greedy else "actions drawn from the policy"
    return f"{found.mean:.2f}{error}, {policy}"


if __name__ == "__main__":
    sys.exit(control(sys.argv[1:]))
