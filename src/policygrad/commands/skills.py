"""`policygrad skills`: guides to tasks for coding agents, in the format of the Agent Skills specification.

A guide is a folder with a SKILL.md, whose YAML front matter has a name and a description (https://agentskills.io/specification).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypedDict

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import HEAD, QUIET, StyledLine, get_page_width, print_lines, wrap_styled
from policygrad.errors import ConfigError
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.filesystem import open_regular, write_atomically

DEFAULT_FOLDER = ".agents/skills"
"""Read by several agents by convention (https://agentskills.io/client-implementation/adding-skills-support), Codex among them
(https://developers.openai.com/codex/skills). Claude Code reads .claude/skills (https://code.claude.com/docs/en/skills)."""
HELP = (
    "List guides to common tasks for coding agents, or write them into a folder: exact commands, what to look at in their JSON, "
    "rules for decisions, and what not to conclude.",
    f"policygrad skills --into  writes to {DEFAULT_FOLDER} of the current folder, where Codex and other agents look",
    "policygrad skills --into .claude/skills  is for Claude Code",
)


@dataclass(frozen=True)
class SkillsOptions:
    """Options of `policygrad skills`."""

    into: Annotated[Path | None, optional_arg("[DIR]", "list them")] = None
    """Write the guides, a folder each, by default to .agents/skills. A file that differs is not overwritten."""
    overwrite: bool = False
    """Replace files that differ."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.overwrite and self.into is None:
            raise ConfigError("--overwrite applies to --into: add --into DIR")


@dataclass(frozen=True)
class Skill:
    """A guide."""

    name: str
    description: str
    text: str  # of SKILL.md


class SkillEntry(TypedDict):
    """A guide."""

    name: str
    description: str
    path: str | None
    """The file that was written."""


class SkillsOutput(TypedDict):
    """The guides."""

    skills: list[SkillEntry]


@prints(SkillsOutput)
def skills(args: list[str]) -> int:
    """Run `policygrad skills [--into [DIR]]`."""
    options = parse_arguments(SkillsOptions, complete_into(args), "skills", *HELP)
    guides = load_skills()
    paths = {} if options.into is None else write_skills(guides, options.into, overwrite=options.overwrite)
    if options.json:
        entries = [{"name": g.name, "description": g.description, "path": paths.get(g.name)} for g in guides]
        print_json({"skills": entries})
    elif paths:
        print("\n".join(str(path) for path in paths.values()))
    else:
        width = get_page_width()
        lines: list[StyledLine] = []
        for guide in guides:
            lines += [((guide.name, HEAD),), *wrap_styled((("  ", ""),), guide.description, width)]
        lines += [(), *wrap_styled((), f"--into DIR writes them; without DIR to {DEFAULT_FOLDER}", width, QUIET)]
        print_lines(lines)
    return 0


def complete_into(args: Sequence[str]) -> list[str]:
    """Return the arguments with the default folder after an --into that has none."""
    result = list[str]()
    for word, after in pairwise([*args, "-"]):
        result += [word, DEFAULT_FOLDER] if word == "--into" and after.startswith("-") else [word]
    return result


def load_skills() -> tuple[Skill, ...]:
    """Return the guides in the package, by name."""
    folders = sorted((folder for folder in files("policygrad").joinpath("skills").iterdir()), key=lambda f: f.name)
    return tuple(parse_skill((folder / "SKILL.md").read_text(encoding="utf-8")) for folder in folders)


def parse_skill(text: str) -> Skill:
    """Parse a guide whose front matter has one line per key. Raises ValueError for another form."""
    match = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n", text)
    if match is None:
        raise ValueError("the front matter must be `name: …` and `description: …`, a line each, between lines of ---")
    return Skill(match[1], match[2], text)


def write_skills(guides: Sequence[Skill], folder: Path, *, overwrite: bool) -> dict[str, Path]:
    """Write each guide to FOLDER/NAME/SKILL.md; return the paths by name.

    Raises:
        ConfigError: A file exists and differs, and `overwrite` is false; nothing is written then.
        RunError: A file cannot be written.
    """
    paths = {guide.name: folder / guide.name / "SKILL.md" for guide in guides}
    texts = {paths[guide.name]: guide.text for guide in guides}
    differing = [path for path, text in texts.items() if path.exists() and not has_text(path, text)]
    if differing and not overwrite:
        raise ConfigError(
            f"--into {folder}: {', '.join(map(str, differing))} would be replaced, and nothing was written. Use another folder, or "
            "--overwrite"
        )
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--into {folder}: {path.parent} cannot be made: {error.strerror}; choose another"
            ) from error
        write_atomically(path, text)
    return paths


def has_text(path: Path, text: str) -> bool:
    """Return whether a file has this text; a pipe, a folder or bytes that are no UTF-8 have another."""
    try:
        with open_regular(path) as file:
            return file.read(len(text.encode()) + 1) == text.encode()
    except OSError:
        return False
