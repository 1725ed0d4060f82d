"""The command line. `policygrad --help` imports nothing; every subcommand imports what it uses."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TextIO

from policygrad.commands import COMMANDS
from policygrad.commands.help import HelpRequest, print_help, print_stored_help
from policygrad.commands.json_output import print_error, print_json, requests_json, reserve_stdout
from policygrad.errors import ConfigError, PolicygradError
from policygrad.utils.garbage import paused_garbage_collection
from policygrad.utils.signals import SignalHandlers

HELP = """policygrad: the policy-gradient family for language models, as one equation
with interchangeable parts

  policygrad train [ALGORITHM] [options]  train; without options: DAPO, on a
                                          model and a task inside the package
  policygrad train --resume RUN           resume a run
  policygrad train mine.py:MY_ALGORITHM   your own algorithm, from a file or a
                                          module
  policygrad train ... --dry-run          print the configuration and the
                                          equation; load no model
  policygrad init [ALGORITHM] > run.toml  a configuration with comments, for
                                          train --config run.toml (or .yaml)
  policygrad convert FILE > run.toml      the same from a script or file of
                                          verl, OpenRLHF, TRL or prime-rl
  policygrad sft --data FILE              supervised fine-tuning on
                                          demonstrations
  policygrad reward-model --data FILE     a reward model from preferences, for
                                          train ... --reward model:RUN
  policygrad eval RUN [MODEL ...]         mean@k, pass@k and maj@k on the run's
                                          evaluation problems; with several
                                          models, their differences
  policygrad chat RUN                     talk to what was trained, beside the
                                          model before; --page: in a browser
  policygrad serve --model M              a training server that speaks the
                                          Tinker API, for loops of your own
  policygrad proxy --model M              serve a model with OpenAI's and
                                          Anthropic's API, to try the program
                                          of train --environment program:…
  policygrad engine ENGINE --model M      start a server that samples
                                          completions; --print shows the command
  policygrad engine install vllm --into DIR
                                          make an environment with an engine,
                                          for train --sampler.python DIR
  policygrad engine check URL --model M   check that a server has the model
  policygrad verify RUN                   check a run: its files against each
                                          other, and steps repeated bit for bit
  policygrad export RUN                   export the model of a stopped run
  policygrad export RUN --merge           merge a trained adapter into a full
                                          model (--learner.lora)
  policygrad export RUN --format gguf     one file for llama.cpp and Ollama
  policygrad compare ROW ROW ...          compare algorithms: seeds, learning
                                          rates, curves, what can be concluded
  policygrad plan [ALGORITHM] --model SHAPE --gpus H200:64
                                          memory, time and cost of a run in
                                          advance; what to change if it does
                                          not fit
  policygrad doctor                       what this machine is, what works on
                                          it, and what would make the rest work
  policygrad runs [FOLDER]                the runs below a folder: step, result,
                                          state, age and time left
  policygrad report RUN ...               an HTML page about runs: curves,
                                          completions, costs; --watch follows
                                          them live
  policygrad audit FILE                   name the formulas behind another
                                          trainer's advantages, loss and
                                          gradient, from one recorded update
  policygrad algorithms [--json]          the matrix of named algorithms
  policygrad show                         list algorithms by family and parts
                                          by field
  policygrad show NAME                    an algorithm: its equation, parts,
                                          defaults with sources, what it fixes,
                                          how it fails; or a part, such as Clip;
                                          a reward, such as math; a metric; or
                                          your own, mine.py:NAME
  policygrad lab                          gradient estimators against the true
                                          gradient, on small problems
  policygrad lab control                  the same algorithms on Gymnasium
                                          environments
  policygrad skills [--into [DIR]]        guides to common tasks, for coding
                                          agents
  policygrad completion bash|zsh|fish     a script for tab completion
  policygrad --version

`policygrad COMMAND --help` shows a command's main options, --help SECTION those
of a section of the configuration, such as sampler, and --help all every one.
With --json, standard output carries JSON only, errors included; COMMAND
--json-schema describes it. No command but chat asks anything.
Exit codes: 0 done; 75 stopped by a signal, by --time-limit, for want of memory
or because one of several processes hung, and can be resumed; 2 invalid or
failed, with the reason; 130 interrupted by a second Ctrl-C; 1 a bug, with its
traceback, failed runs of compare, or what verify or audit found wrong.
Documentation: README.md and docs/.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `HELP`), which a closed standard output does not change."""
    # Let waiting threads sleep instead of spin, which slows small models tenfold on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets ? for Ψ, not a traceback
    # Ctrl-C as Python handles it, but not in the middle of an import; another handler that is installed stays.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts = (
        SignalHandlers(signal.default_int_handler, (signal.SIGINT,)) if is_default else contextlib.nullcontext()
    )
    try:
        with warnings.catch_warnings(), interrupts:
            # without the line of code that raised it
            warnings.showwarning = lambda message, *_, **__: _print_error(f"warning: {message}")
            return _run_json(args) if requests_json(args) else _run(args)
    except SystemExit as end:  # by tyro, after its help or error message
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 130
    except BrokenPipeError:  # `policygrad algorithms | head -1`
        return 1
    except PolicygradError as error:  # anything else is a bug and shows its traceback
        if os.environ.get("POLICYGRAD_DEBUG"):
            raise
        _print_error(f"error: {error}")
        return error.code
    finally:
        _flush(sys.stdout)
        _flush(sys.stderr)


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(text, file=sys.stderr)


def _flush(stream: TextIO) -> None:
    """Flush the stream; if it is closed, redirect it so that Python does not exit with code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run_json(args: list[str]) -> int:
    """Run a command whose standard output carries JSON only; an error is an object of its own, and is raised too."""
    with reserve_stdout():
        try:
            return _run(args)
        except BrokenPipeError:
            raise
        except SystemExit as end:
            if end.code:
                message = " ".join(getattr(end, "__notes__", []))
                print_error("UsageError", message, end.code if isinstance(end.code, int) else 1)
            raise
        except KeyboardInterrupt:
            print_error("Interrupted", "interrupted", 130)
            raise
        except Exception as error:
            print_error(type(error).__name__, str(error), error.code if isinstance(error, PolicygradError) else 1)
            raise


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] in ("-V", "--version", "version"):
        from policygrad import __version__

        print(f"policygrad {__version__}")
        return 0
    for arg in args:
        if "\0" in arg:
            raise ConfigError(f"{arg!r} contains a NUL character; remove it")
    name, *args = args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"available: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}: {hint}")
    if "--json-schema" in args:
        from policygrad.commands.json_schemas import build_schema

        print_json(build_schema(name))
        return 0
    if print_stored_help(name, args):
        return 0
    module, _, function = COMMANDS[name].partition(":")
    with paused_garbage_collection():
        command: Callable[[list[str]], int] = getattr(import_module(module), function)
    try:
        return command(args)
    except HelpRequest as request:
        print_help(request.page, request.topic)
        return 0
    except OSError as error:  # wherever a name from the arguments is first looked up
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename or "")
        raise ConfigError(
            f"{name[:40]!r}… ({len(name)} characters) is too long for a file's name; shorten it"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
