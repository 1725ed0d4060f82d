"""Converts every example of verl, OpenRLHF, prime-rl and TRL with `policygrad convert`, and counts what became of their options.

    python scripts/convert_examples.py verl=FOLDER OpenRLHF=FOLDER prime-rl=FOLDER TRL=FOLDER verl-recipe=FOLDER open-r1=FOLDER

The last two are collections that use verl and TRL. FOLDER is a git repository, with or without files (a bare one is enough); what
its HEAD holds is read, or with FOLDER@COMMIT another commit. The results go to docs/results/conversions.json, and from there into
docs/from-other-libraries.md (scripts/make_docs.py). --show prints each file, --try writes no results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tarfile
import tempfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from policygrad.commands.convert import convert_source, read_sources
from policygrad.errors import PolicygradError
from results import RESULTS


class Examples(NamedTuple):
    """Which files of a library are examples of its policy gradients."""

    folders: tuple[str, ...]
    suffixes: tuple[str, ...]
    text: str  # a pattern of what such a file contains


EXAMPLES = {
    "verl": Examples(("examples", "verl/experimental"), (".sh", ".yaml"), r"main_ppo"),
    "OpenRLHF": Examples(("examples",), (".sh",), r"openrlhf\.cli\.train_ppo"),
    "prime-rl": Examples(("examples", "configs"), (".toml",), r"(?m)^\[+orchestrator"),
    "TRL": Examples(("examples/scripts",), (".py",), r"\b(Async)?(GRPO|RLOO|PPO|SDPO|SDFT|Distillation)Config\b"),
    "verl-recipe": Examples((".",), (".sh",), r"main_\w+"),
    "open-r1": Examples(("recipes",), (".yaml",), r"num_generations"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY=FOLDER")
    parser.add_argument("--show", action="store_true", help="print each file with what became of it")
    parser.add_argument("--try", action="store_true", dest="is_trial", help="only print the counts")
    parser.add_argument("--results", type=Path, default=RESULTS / "conversions.json")
    given = parser.parse_args(arguments)
    rows = {}
    for argument in given.libraries:
        name, _, place = argument.partition("=")
        folder, _, commit = place.partition("@")
        if name not in EXAMPLES:
            parser.error(f"{name!r} is none of {', '.join(EXAMPLES)}")
        with tempfile.TemporaryDirectory() as files:
            source = extract(Path(folder), commit or "HEAD", Path(files))
            rows[name] = {**describe_commit(Path(folder), commit or "HEAD"), **measure(name, source, given.show)}
        print(name, {key: value for key, value in rows[name].items() if key != "failed"})
    if given.is_trial:
        return
    old = json.loads(given.results.read_text(encoding="utf-8")) if given.results.exists() else {}
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    libraries = {**old.get("libraries", {}), **rows}
    text = json.dumps(
        {"date": day, "libraries": {name: libraries[name] for name in EXAMPLES if name in libraries}}, indent=2
    )
    given.results.write_text(text + "\n", encoding="utf-8")


def describe_commit(folder: Path, name: str) -> dict[str, str]:
    """Return the commit that is read, and its day."""
    commit, day = _git(folder, "log", "-1", "--format=%h %cs", name).decode().split()
    return {"commit": commit[:7], "day": day}


def extract(folder: Path, commit: str, place: Path) -> Path:
    """Write the files of a commit into a folder."""
    with tarfile.open(fileobj=BytesIO(_git(folder, "archive", commit))) as archive:
        archive.extractall(place, filter="data")
    return place


def measure(library: str, folder: Path, show: bool = False) -> dict[str, Any]:
    """Convert a library's examples, and return the counts.

    A file is converted if a run was built from each of its commands.
    """
    counts = dict.fromkeys(("files", "converted", "options", "translated", "left_out", "unknown"), 0)
    failed = []
    for path in find_examples(EXAMPLES[library], folder):
        name = str(path.relative_to(folder))
        counts["files"] += 1
        try:
            for source in read_sources([str(path)]):
                done, _ = convert_source(source)
                counts["options"] += len(done.names)
                counts["translated"] += done.translated
                counts["unknown"] += len(done.unknown)
        except PolicygradError as error:
            failed.append({"file": name, "error": str(error).replace(f"{folder}/", "")})
        else:
            counts["converted"] += 1
        if show:
            print(name, failed[-1]["error"] if failed and failed[-1]["file"] == name else "converted")
    counts["left_out"] = counts["options"] - counts["translated"] - counts["unknown"]
    return {**counts, "failed": failed}


def find_examples(examples: Examples, folder: Path) -> list[Path]:
    """Return the files that are examples."""
    files = (path for place in examples.folders for path in sorted((folder / place).rglob("*")))
    kinds = (path for path in files if path.suffix in examples.suffixes and path.is_file())
    return [path for path in kinds if re.search(examples.text, path.read_text(encoding="utf-8", errors="replace"))]


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
