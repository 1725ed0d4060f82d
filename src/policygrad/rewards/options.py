"""`name=value,name=value` behind a reward's name, read into a dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from policygrad.errors import ConfigError

T = TypeVar("T")
Read = Callable[[str], Any]
"""From a word to its value. Raises ValueError, whose text says what is needed."""


def from_options(kind: type[T], reward: str, text: str, readers: Mapping[str, Read], **given: Any) -> T:
    """An instance of a dataclass. reward: its name, for messages. readers: of the options that are not words. given: fields that
    are no options, and neither are those that are not compared.

    Raises:
        ConfigError: an option that there is not, or a value that it cannot have.
    """
    known = [field.name for field in fields(kind) if field.compare and field.name not in given]  # type: ignore[arg-type]
    values = dict(given)
    for option in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in option.partition("="))
        if name not in known:
            raise ConfigError(
                f"reward {reward!r}: there is no option {name!r}; write {reward}:{','.join(f'{n}=…' for n in known)}"
            )
        try:
            values[name] = readers.get(name, str)(value)
        except ValueError as error:
            raise ConfigError(f"reward {reward!r}: {name} is {error}, not {value!r}") from None
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(
            f"reward {reward!r} needs {' and '.join(missing)}: {reward}:…,{','.join(f'{n}=…' for n in missing)}"
        )
    return kind(**values)


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def yes(text: str) -> bool:
    """yes or no."""
    if text.lower() not in ("yes", "no", "true", "false"):
        raise ValueError("yes or no")
    return text.lower() in ("yes", "true")


def choice(*words: str) -> Read:
    """One of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return read


def last_value(text: str, name: str) -> str | None:
    """What `from_options` would take for this option."""
    pairs = [option.partition("=") for option in text.split(",")]
    return next((value.strip() for word, equals, value in reversed(pairs) if equals and word.strip() == name), None)
