"""`policygrad completion bash|zsh|fish`: print a script that completes commands, algorithms, parts and options.

tyro's own completion (shtab) is not used: it covers one subcommand at a time, knows no algorithms or parts, and starts Python for
every Tab. These scripts hold all words and start nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.cluster.config import ADDRESSES
from policygrad.commands import COMMANDS
from policygrad.commands.help import list_command_flags
from policygrad.commands.options import SELECTABLE_FIELDS, build_option_type, list_part_flags
from policygrad.commands.parsing import parse_arguments
from policygrad.compare.plan import LADDERS
from policygrad.core.algorithm import Algorithm
from policygrad.lab.report import EXPERIMENTS
from policygrad.planning.hardware import DEVICES
from policygrad.planning.model_sizes import EMBEDDED_MODELS, VISION_MODEL
from policygrad.rewards.resolve import list_rewards
from policygrad.samplers.config import LOCAL, LORA_SYNCS, WEIGHT_TRANSPORTS
from policygrad.samplers.engines.registry import ENGINES
from policygrad.tasks.benchmarks import load_benchmarks
from policygrad.tasks.reasoning_gym import EMBEDDED
from policygrad.trackers.registry import TRACKERS
from policygrad.training.config.serialization import list_parts

BASH = """# tab completion of policygrad; written by `policygrad completion {shell}`
{setup}_policygrad() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "$before" in
{values}        *)
            case "${{COMP_WORDS[1]}}" in
{options}            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _policygrad policygrad
"""
FISH = """# tab completion of policygrad; written by `policygrad completion fish`
function __policygrad
    set -l argv (commandline -opc)
    set -l words
    if test (count $argv) -eq 1
        set words {commands}
    else
        switch $argv[-1]
{values}            case '*'
                switch $argv[2]
{options}                end
        end
    end
    if test -n "$words"
        string split -n ' ' -- $words
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c policygrad -f -a '(__policygrad)'
"""
FIELD_FLAGS = {name: f"--algorithm.{name.replace('_', '-')}" for name in SELECTABLE_FIELDS}
_REQUIRED = {f.name for f in fields(Algorithm) if "None" not in str(f.type) and "tuple" not in str(f.type)}
# Values of each flag; flags with the same values are joined by |.
FLAG_VALUES = {
    **{flag: [*(["none"] if name not in _REQUIRED else []), *list_parts(name)] for name, flag in FIELD_FLAGS.items()},
    "--algorithm|--base": list(ALGORITHMS),
    "--config|--resume|--output|--directory|--eval-data|--data": [],  # files and folders, completed by the shell
    "--benchmark-data|--evaluation.benchmark-data": [],
    "--experiment": [*EXPERIMENTS, "none"],
    "--ladder": list(LADDERS),
    "--gpus": list(DEVICES),
    "--model": list(EMBEDDED_MODELS),
    "--task": [*EMBEDDED, VISION_MODEL],
    "--benchmark": [*load_benchmarks(), "list"],
    "--evaluation.benchmarks": list(load_benchmarks()),
    "--dtype": ["fp32", "bf16"],
    "--learner.dtype": ["auto", "fp32", "bf16"],
    "--reward": list_rewards(),
    "--track": list(TRACKERS),
    "--optimizer.masters": ["fp32", "none"],
    "--optimizer.name": ["adamw", "adamw8bit", "muon", "sgd"],
    "--optimizer.schedule": ["constant", "linear", "cosine"],
    "--sampler.engine": [LOCAL, *ENGINES],
    "--cluster": list(ADDRESSES),
    "--sampler.lora-sync": [*LORA_SYNCS],
    "--sampler.weight-transport|--weight-transport": [*WEIGHT_TRANSPORTS],
}
HELP = (
    "Print a script for tab completion of commands, algorithms, parts and options.",
    "bash:  policygrad completion bash > ~/.local/share/bash-completion/completions/policygrad",
    "zsh:  policygrad completion zsh > ~/.policygrad.zsh, and after compinit in ~/.zshrc: source ~/.policygrad.zsh",
    "fish:  policygrad completion fish > ~/.config/fish/completions/policygrad.fish",
)


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `policygrad completion`."""

    shell: Annotated[tyro.conf.Positional[Literal["bash", "zsh", "fish"]], tyro.conf.arg(metavar="bash|zsh|fish")]
    """Shell to complete in."""


def completion(args: list[str]) -> int:
    """Run `policygrad completion bash|zsh|fish`."""
    print(generate_script(parse_arguments(CompletionOptions, args, "completion", *HELP).shell), end="")
    return 0


def generate_script(shell: str) -> str:
    """Return the script for bash, which zsh runs through its bashcompinit, or for fish."""
    options = dict[str, list[str]]()  # command -> words that it accepts anywhere
    for name in COMMANDS:
        options[name] = [*list_command_flags(name), "--help"]
    part_flags = (flag for a in ALGORITHMS.values() for flag in list_part_flags(build_option_type(a)))
    options["train"] = list(dict.fromkeys([*options["train"], *FIELD_FLAGS.values(), *part_flags]))
    options["compare"] += ALGORITHMS
    rewards = [name.rstrip(":") for name in list_rewards()]
    options["show"] = [*dict.fromkeys([*ALGORITHMS, *list_parts(), *rewards, *load_benchmarks()])]
    arguments = {  # words that a command accepts as its first argument
        "train": list(ALGORITHMS),
        "init": list(ALGORITHMS),
        "plan": list(ALGORITHMS),
        "eval": list(EMBEDDED_MODELS),
        "engine": [*ENGINES, "check"],
        "lab": ["control"],
        "completion": ["bash", "zsh", "fish"],
    }
    if shell == "fish":
        return FISH.format(
            commands=_quote([*COMMANDS, "--help", "--version"]),
            values="".join(
                f"            case {flags.replace('|', ' ')}\n                set words {_quote(words)}\n"
                for flags, words in FLAG_VALUES.items()
            ),
            options="".join(
                f"                    case {name}\n                        set words {_quote(words)}\n"
                f"                        test (count $argv) -eq 2; and set words $words {_quote(arguments.get(name, ()))}\n"
                for name, words in options.items()
            ),
        )
    return BASH.format(
        shell=shell,
        setup="autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=_quote([*COMMANDS, "--help", "--version"]),
        values="".join(f"        {flags}) words={_quote(words)} ;;\n" for flags, words in FLAG_VALUES.items()),
        options="".join(
            f'            {name}) words={_quote(words)}; [ "$COMP_CWORD" -eq 2 ] && words="$words "'
            f"{_quote(arguments.get(name, ()))} ;;\n"
            for name, words in options.items()
        ),
    )


def _quote(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
