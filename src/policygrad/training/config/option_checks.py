"""Checks of single options that several commands have."""

from __future__ import annotations

import math
import os

from policygrad.errors import ConfigError

MAX_LR = 1e6  # beyond any useful rate; float32 overflows above 3e38, which torch does not explain
MAX_COMPLETIONS = 2**24
"""Per rollout or evaluation: hundreds of times what anybody samples, and few enough to list in memory."""


def check_environment_timeout(seconds: float) -> None:
    """Raise ConfigError for a limit that is not positive and finite."""
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"environment.timeout must be above 0 seconds and finite, not {seconds:g}; a long limit is 86400, a day"
        )


def check_lr(lr: float | None) -> None:
    """Raise ConfigError for a learning rate that is negative, not finite, or so large that it overflows in the optimizer."""
    if lr is None:
        return
    if not 0 <= lr < math.inf:
        raise ConfigError(f"lr must be at least 0 and finite, not {lr}")
    if lr > MAX_LR:
        raise ConfigError(f"lr must be at most {MAX_LR:g}, not {lr:g}")


def check_completion_count(prompts_option: str, prompts: int, samples_option: str, samples: int) -> None:
    """Raise ConfigError for more than `MAX_COMPLETIONS` at once, naming the two options."""
    if prompts * samples > MAX_COMPLETIONS:
        raise ConfigError(
            f"{prompts_option} {prompts} times {samples_option} {samples} must be at most {MAX_COMPLETIONS:,} completions: lower "
            "one of them"
        )


def check_folders(output: str | None, directory: str | None = None) -> None:
    """Raise ConfigError for a name that no file system accepts, and for an empty output: an unset variable would otherwise write
    into the current folder."""
    if output is not None and not str(output).strip():
        raise ConfigError(
            f"output must name a folder, not {output!r}: leave it out for the next free one, or use . for the current one"
        )
    for option, name in (("output", output), ("directory", directory)):
        try:
            valid = name is None or b"\0" not in os.fsencode(str(name))
        except UnicodeError:  # half a surrogate pair
            valid = False
        if not valid:
            raise ConfigError(f"{option} must name a folder, not {name!r}, which no file system accepts")


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that torch or a counter-based generator does not accept."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2**63, not {seed}")
