"""The command line. Help for `policygrad` itself needs no import; every subcommand imports what it uses."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TextIO

from policygrad.commands import COMMANDS
from policygrad.errors import ConfigError, PolicygradError
from policygrad.utils.signals import SignalHandlers

HELP = """policygrad: the policy-gradient family for language models, as one equation
with interchangeable parts

  policygrad train [ALGORITHM] [options]  train; without options: DAPO, on a
                                          model and a task inside the package
  policygrad train --resume RUN           go on with a run
  policygrad train mine.py:MY_ALGORITHM   an algorithm of your own, from a file
                                          or a module
  policygrad train ... --dry-run          print the configuration and the
                                          equation; load no model
  policygrad sft --data FILE              supervised fine-tuning on
                                          demonstrations
  policygrad reward-model --data FILE     a reward model from preferences, for
                                          train ... --reward model:RUN
  policygrad eval RUN [MODEL ...]         mean@k, pass@k and maj@k on the run's
                                          held-out problems; of several models
                                          how far apart they are
  policygrad engine ENGINE --model M      a server that draws completions:
                                          starts it, or with --print says how
  policygrad engine check URL --model M   whether a server draws from a model
  policygrad export RUN                   the model of a run that was stopped
  policygrad export RUN --merge           a trained adapter (--learner.lora) in
                                          the weights of a whole model
  policygrad export RUN --format gguf     one file for llama.cpp and Ollama
  policygrad compare ROW ROW ...          algorithms against each other: seeds,
                                          learning rates, curves, what can be
                                          concluded
  policygrad plan [ALGORITHM] --model SHAPE --gpus H200:64
                                          memory, seconds and cost of a run,
                                          before it is begun; what to change
                                          where it does not fit
  policygrad report RUN ...               what runs have done, as a page:
                                          curves, completions, costs; --watch
                                          follows them
  policygrad algorithms [--json]          the matrix of named algorithms
  policygrad show                         what there is: the algorithms by
                                          family, the parts by where they go
  policygrad show NAME                    an algorithm: its equation, parts,
                                          defaults with sources, what it fixes,
                                          how it fails; or one part, such as
                                          Clip; or your own, mine.py:NAME
  policygrad lab                          gradient estimators measured against
                                          the true gradient, on small problems
  policygrad lab control                  the same algorithms on Gymnasium
                                          environments
  policygrad completion bash|zsh|fish          a script for tab completion
  policygrad --version

`policygrad COMMAND --help` lists a command's options.
Exit codes: 0 done; 75 stopped by a signal or --time-limit, or one of several
processes hung, and --resume goes on; 2 cannot be done, or failed, with the
reason; 130 ended at once, by a second Ctrl-C; 1 a bug, with its traceback, or
runs of compare that failed.
Documentation: README.md and docs/.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0 = done; 75 = stopped by a signal, a time limit or a process that hung, resumably; 2 = cannot be done, or
    failed, with the reason on standard error; 130 = interrupted. That nobody reads what a run prints changes none of these."""
    # Waiting threads sleep instead of spinning: on a machine with any other load, spinning slows small models tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets ? for Ψ, not a traceback
    try:
        with warnings.catch_warnings(), _ctrl_c():
            warnings.showwarning = _warn
            return _run(args)
    except SystemExit as end:  # tyro's, after its help or its own error message
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # `policygrad algorithms | head -1`
        return 1
    except PolicygradError as error:  # what is raised besides is a bug, and a bug shows its traceback
        if os.environ.get("POLICYGRAD_DEBUG"):
            raise
        _say(f"error: {error}")
        return error.code
    finally:
        _flush(sys.stdout)
        _flush(sys.stderr)


def _ctrl_c() -> contextlib.AbstractContextManager[object]:
    """Ctrl-C as Python has it, where nobody else handles it; but it ends no import in its midst."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return contextlib.nullcontext()
    return SignalHandlers(signal.default_int_handler, (signal.SIGINT,))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or there is no standard error at all
        print(text, file=sys.stderr)


def _flush(stream: TextIO) -> None:
    """Python would complain, and exit with 120, of what it cannot write when it closes the stream."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] in ("-V", "--version", "version"):
        from policygrad import __version__

        print(f"policygrad {__version__}")
        return 0
    for word in args:
        if "\0" in word:
            raise ConfigError(f"{word!r} holds a NUL character, which no name, address or number has: leave it out")
    return _command(args[0])(args[1:])


def _command(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}: {hint}")
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning in words, without the line of code that gave it."""
    _say(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
