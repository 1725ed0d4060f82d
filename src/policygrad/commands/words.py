"""What is wrong with a command line before its options are read."""

from __future__ import annotations

from collections.abc import Sequence

from policygrad.errors import ConfigError


def refuse_empty(args: Sequence[str], *flags: str) -> None:
    """Raises ConfigError for a flag of several values that has none: it would be taken for one that was not given."""
    for word, after in zip(args, [*args[1:], "-"], strict=False):
        flag, equals, value = word.partition("=")
        if flag in flags and not (value.strip() if equals else after.strip() and not after.startswith("-")):
            raise ConfigError(f"{flag} needs a value, or several: leave it away for the default")


def refuse_cluster(args: Sequence[str], command: str, way_out: str) -> None:
    """Raises ConfigError for `--cluster` and what belongs to it, which `policygrad train` alone has."""
    if odd := [word for word in args if word.partition("=")[0].partition(".")[0] == "--cluster"]:
        raise ConfigError(
            f"{odd[0].partition('=')[0]} is of `policygrad train`, whose work a Ray cluster can do; `policygrad {command}` "
            f"{way_out}"
        )
