"""`policygrad completion bash|zsh|fish`: a script that completes commands, algorithms, parts and options, and starts no Python."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.cluster.config import ADDRESSES
from policygrad.commands import COMMANDS
from policygrad.commands.compare import CompareOptions
from policygrad.commands.engine import EngineOptions
from policygrad.commands.evaluate import list_eval_flags as evaluate_flags
from policygrad.commands.export import ExportOptions
from policygrad.commands.lab import LabOptions
from policygrad.commands.options import build_option_type, list_part_flags
from policygrad.commands.plan import PlanOptions
from policygrad.commands.render import wrap_paragraphs
from policygrad.commands.report import ReportOptions
from policygrad.commands.supervised import list_supervised_flags as supervised_flags
from policygrad.commands.train import list_train_flags
from policygrad.compare.plan import LADDERS
from policygrad.core.algorithm import Algorithm
from policygrad.lab.report import EXPERIMENTS
from policygrad.planning.hardware import DEVICES
from policygrad.rewards import list_rewards
from policygrad.samplers.config import LOCAL, LORA_SYNCS, WEIGHT_TRANSPORTS
from policygrad.samplers.engines.registry import ENGINES
from policygrad.tasks import EMBEDDED
from policygrad.trackers.services import SERVICES
from policygrad.training.config.serialization import list_parts
from policygrad.training.config.supervised import SFTConfig

SCRIPT = """# tab completion of policygrad; written by `policygrad completion {shell}`
{zsh}_policygrad() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "$before" in
{values}        *)
            case "${{COMP_WORDS[1]}}" in
            train) words={train}; [ "$COMP_CWORD" -eq 2 ] && words="$words "{algorithms} ;;
            sft|reward-model) words={supervised} ;;
            eval) words={evaluate}; [ "$COMP_CWORD" -eq 2 ] && words="$words tiny" ;;
            engine) words={engine}; [ "$COMP_CWORD" -eq 2 ] && words="$words {engines} check" ;;
            export) words={export} ;;
            compare) words={compare}" "{algorithms} ;;
            plan) words={plan}; [ "$COMP_CWORD" -eq 2 ] && words="$words "{algorithms} ;;
            report) words={report} ;;
            algorithms) words="--json --width --help" ;;
            show) words={names} ;;
            lab) words={lab}; [ "$COMP_CWORD" -eq 2 ] && words="$words control" ;;
            completion) words="bash zsh fish" ;;
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _policygrad policygrad
"""


FISH = """# tab completion of policygrad; written by `policygrad completion fish`
function __policygrad
    set -l words (commandline -opc)
    set -l found
    if test (count $words) -eq 1
        set found {commands}
    else
        switch $words[-1]
{values}            case '*'
                switch $words[2]
                    case train
                        set found {train}
                        test (count $words) -eq 2; and set found $found" "{algorithms}
                    case sft reward-model
                        set found {supervised}
                    case eval
                        set found {evaluate}
                        test (count $words) -eq 2; and set found $found" tiny"
                    case compare
                        set found {compare}" "{algorithms}
                    case engine
                        set found {engine}
                        test (count $words) -eq 2; and set found $found" {engines} check"
                    case export
                        set found {export}
                    case plan
                        set found {plan}
                        test (count $words) -eq 2; and set found $found" "{algorithms}
                    case report
                        set found {report}
                    case algorithms
                        set found "--json --width --help"
                    case show
                        set found {names}
                    case lab
                        set found {lab}
                        test (count $words) -eq 2; and set found $found" control"
                    case completion
                        set found "bash zsh fish"
                end
        end
    end
    if test -n "$found"
        string split -n ' ' -- $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c policygrad -f -a '(__policygrad)'
"""


HELP = (
    "A script for tab completion of commands, algorithms, parts and options.",
    "bash:  policygrad completion bash > ~/.local/share/bash-completion/completions/policygrad",
    "zsh:  policygrad completion zsh > ~/.policygrad.zsh, and after compinit in ~/.zshrc: source ~/.policygrad.zsh",
    "fish:  policygrad completion fish > ~/.config/fish/completions/policygrad.fish",
)


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `policygrad completion`."""

    shell: Annotated[tyro.conf.Positional[Literal["bash", "zsh", "fish"]], tyro.conf.arg(metavar="bash|zsh|fish")]
    """For which shell."""


def completion(args: list[str]) -> int:
    """`policygrad completion bash|zsh|fish`."""
    shell = tyro.cli(
        CompletionOptions, args=args, prog="policygrad completion", description=wrap_paragraphs(*HELP)
    ).shell
    print(generate_script(shell), end="")
    return 0


def generate_script(shell: str) -> str:
    """The script for bash, which zsh runs through its bashcompinit; fish has one of its own, with the same words."""
    train = dict.fromkeys(
        [
            *list_train_flags("grpo"),
            *(f"--algorithm.{p}" for p in _places()),
            *(flag for a in ALGORITHMS.values() for flag in list_part_flags(build_option_type(a))),
        ]
    )
    fish = shell == "fish"
    each = (
        "            case {flags}\n                set found {words}\n"
        if fish
        else "        {flags}) words={words} ;;\n"
    )
    return (FISH if fish else SCRIPT).format(
        shell=shell,
        zsh="autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=_quoted([*COMMANDS, "--help", "--version"]),
        values="".join(
            each.format(flags=flags.replace("|", " ") if fish else flags, words=_quoted(known))
            for flags, known in _values().items()
        ),
        train=_quoted([*train, "--help"]),
        algorithms=_quoted(ALGORITHMS),
        supervised=_quoted([*supervised_flags(SFTConfig), "--help"]),
        evaluate=_quoted([*evaluate_flags(), "--help"]),
        engine=_options(EngineOptions, "target", "url"),
        engines=" ".join(ENGINES),
        export=_options(ExportOptions, "run"),
        compare=_options(CompareOptions, "rows"),
        plan=_options(PlanOptions),
        report=_options(ReportOptions, "runs"),
        names=_quoted([*ALGORITHMS, *list_parts()]),
        lab=_options(LabOptions),
    )


def _places() -> list[str]:
    """Of an algorithm's parts."""
    return [f.name for f in fields(Algorithm) if f.name not in ("name", "samples_per_prompt")]


def _values() -> dict[str, list[str]]:
    """Flags, with | between those that take the same, and what they take."""
    required = {f.name for f in fields(Algorithm) if "None" not in str(f.type) and "tuple" not in str(f.type)}
    values = {f"--algorithm.{p}": [*(["none"] if p not in required else []), *list_parts(p)] for p in _places()}
    return (
        values
        | {
            "--algorithm": list(ALGORITHMS),
            "--config|--resume|--output|--directory|--eval-data|--data": [],  # a file's or folder's name, which the shell knows
            "--experiment": [*EXPERIMENTS, "none"],
            "--base": list(ALGORITHMS),
            "--ladder": list(LADDERS),
            "--gpus": list(DEVICES),
            "--model": ["tiny"],
            "--task": list(EMBEDDED),
            "--dtype": ["fp32", "bf16"],
            "--learner.dtype": ["auto", "fp32", "bf16"],
            "--reward": [*list_rewards(), "judge:", "length_penalty:", "model:", "openrlhf:", "verl:"],
            "--track": list(SERVICES),
            "--optimizer.schedule": ["constant", "linear", "cosine"],
            "--sampler.engine": [LOCAL, *ENGINES],
            "--cluster": list(ADDRESSES),
            "--sampler.lora-sync": [*LORA_SYNCS],
            "--sampler.weight-transport|--weight-transport": [*WEIGHT_TRANSPORTS],
        }
    )


def _options(kind: Any, *without: str) -> str:
    """The flags of a command whose options are such a dataclass, but for what it takes by place."""
    names = (f.name.replace("_", "-") for f in fields(kind) if f.name not in without)
    return _quoted([*(f"--{name}" for name in names), "--help"])


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
