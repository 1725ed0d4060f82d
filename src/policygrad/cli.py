"""The command line. Help for `policygrad` itself needs no import; every subcommand imports what it uses."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HELP = """policygrad: the policy-gradient family for language models, as one equation with interchangeable parts

  policygrad train [ALGORITHM] [options]   train; without options: GRPO on a small model and task inside the package
  policygrad train --resume RUN            go on with a run
  policygrad eval MODEL --task TASK        mean@k and pass@k of a model on held-out problems
  policygrad algorithms [--json]           the matrix of named algorithms
  policygrad show ALGORITHM                its equation, parts, defaults with sources, what it fixes, how it fails

`policygrad COMMAND --help` lists a command's options. Documentation: README.md and docs/.
"""


class UsageError(ValueError):
    """A command line that cannot be understood, with the way out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 = done, 2 = what was asked cannot be done, with the reason on standard error, 130 = interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] in ("-V", "--version"):
        from policygrad import __version__

        print(f"policygrad {__version__}")
        return 0
    try:
        return _command(args[0])(args[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if not _is_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _command(name: str) -> Callable[[list[str]], int]:
    from policygrad import commands

    known: dict[str, Callable[[list[str]], int]] = {
        "train": commands.train,
        "eval": commands.evaluate,
        "algorithms": commands.algorithms,
        "show": commands.show,
    }
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"unknown command {name!r}: {hint}")
    return known[name]


def _is_users(error: Exception) -> bool:
    """Whether the error was raised by our own code, in words meant for the user, and not by a library in the midst of ours.

    POLICYGRAD_DEBUG=1 shows the traceback all the same.
    """
    if os.environ.get("POLICYGRAD_DEBUG") or not isinstance(
        error, (ValueError, RuntimeError, OSError, ImportError, ArithmeticError)
    ):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
