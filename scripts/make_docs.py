"""Write the generated pages of the documentation.

These are README's count of algorithms, docs/algorithms with a picture of each gate, docs/reference and docs/measured.*; and parts
of docs/architecture.md (picture, rooms), docs/engines.md, docs/extras.md, docs/evaluation.md and docs/rewards.md (tables),
docs/from-other-libraries.md (options), docs/primer.md (findings of the lab), docs/planning.md and docs/large-runs.md
(predictions against measurements), docs/small-models.md, docs/scaling.md and docs/gpu.md (results). Also what the command line
prints of the package's own, commands/help.json, commands/show.json and training/embedded_memory.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from make_lab import PRIMER_FIGURES
from pages.agents import agents_block
from pages.algorithms import algorithm_page, count_algorithms, index_page, quote_finding
from pages.aligned import aligned_block
from pages.architecture import picture, rooms_block
from pages.blocks import (
    accuracy_block,
    architectures_block,
    benchmarks_block,
    conversions_block,
    describe_json,
    engines_block,
    extras_block,
    faults_block,
    formats_block,
    json_block,
    learned_block,
    math_block,
    metrics_page,
    options_block,
    real_model_block,
    real_model_picture,
    repair_block,
    serve_block,
    supervised_options_block,
    templates_block,
)
from pages.commands import help_file, show_file
from pages.figures import gate_figure, owners
from pages.gpu import seen_block
from pages.lengths import FIGURE, lengths_block, lengths_figure
from pages.markdown import fill_blocks, load, run_code_blocks
from pages.measured import curves, measured_page
from pages.memory import embedded_memory_file
from pages.optimizers import measured_block, memory_block
from pages.planning import checked_block, devices_block
from pages.proxy import proxy_block
from pages.published import constants_block, dense_block, experts_block, figures_block, misses_block, summary_block
from pages.reference import reference_pages
from pages.reliability import reliability_page
from pages.trl import trl_fields_block, trl_numbers_block, trl_tests_block
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.help import HELP_FILE
from policygrad.commands.show import SHOWN_FILE
from policygrad.training.memory_probe import STORED_FILE

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
CHECKED = (DOCS / "where-sources-disagree.md",)
GENERATED = ("algorithms/*.md", "algorithms/gates/*.svg", "reference/*.md")
"""Patterns of files that are all generated."""


def generate_files() -> dict[Path, str]:
    """Return the content of every generated file."""
    pages = {DOCS / "algorithms" / f"{name}.md": algorithm_page(name) for name in ALGORITHMS}
    gates = {DOCS / "algorithms" / "gates" / f"{name}.svg": gate_figure(name) for name in owners()}
    reference = {DOCS / "reference" / name: text for name, text in reference_pages().items()}
    return {
        HELP_FILE: help_file(),
        SHOWN_FILE: show_file(),
        STORED_FILE: embedded_memory_file(),
        README: fill_blocks(README, algorithms=count_algorithms()),
        DOCS / "architecture.md": fill_blocks(DOCS / "architecture.md", rooms=rooms_block("../")),
        DOCS / "architecture.svg": picture(),
        DOCS / "models.md": fill_blocks(
            DOCS / "models.md",
            families=architectures_block(),
            formats=formats_block(),
            templates=templates_block(),
        ),
        DOCS / "algorithms" / "index.md": index_page(),
        **pages,
        **gates,
        **reference,
        DOCS / "from-other-libraries.md": fill_blocks(
            DOCS / "from-other-libraries.md",
            trl=options_block("TRL"),
            verl=options_block("verl"),
            openrlhf=options_block("OpenRLHF"),
            conversions=conversions_block(),
            **{"prime-rl": options_block("prime-rl")},
            supervised=supervised_options_block(),
            **{"trl-fields": trl_fields_block(), "trl-tests": trl_tests_block(), "trl-numbers": trl_numbers_block()},
        ),
        DOCS / "primer.md": fill_blocks(
            DOCS / "primer.md", **{name: quote_finding(name, "primer") for name in PRIMER_FIGURES}
        ),
        DOCS / "engines.md": fill_blocks(DOCS / "engines.md", faults=faults_block(), measured=engines_block()),
        DOCS / "serve.md": fill_blocks(DOCS / "serve.md", measured=serve_block()),
        DOCS / "agents.md": fill_blocks(DOCS / "agents.md", agents=agents_block(), measured=proxy_block()),
        DOCS / "environments.md": fill_blocks(DOCS / "environments.md", learned=learned_block()),
        DOCS / "repair.md": fill_blocks(DOCS / "repair.md", repair=repair_block()),
        DOCS / "extras.md": fill_blocks(DOCS / "extras.md", extras=extras_block()),
        DOCS / "scaling.md": fill_blocks(DOCS / "scaling.md", accuracy=accuracy_block()),
        DOCS / "gpu.md": fill_blocks(DOCS / "gpu.md", seen=seen_block()),
        DOCS / "memory.md": fill_blocks(
            DOCS / "memory.md", memory=memory_block(), measured=measured_block(), lengths=lengths_block()
        ),
        **({} if (figure := lengths_figure()) is None else {DOCS / FIGURE: figure}),
        DOCS / "distillation.md": fill_blocks(DOCS / "distillation.md", aligned=aligned_block()),
        DOCS / "rewards.md": fill_blocks(DOCS / "rewards.md", judged=math_block()),
        DOCS / "evaluation.md": fill_blocks(DOCS / "evaluation.md", benchmarks=benchmarks_block()),
        DOCS / "measured.md": measured_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "reference" / "json.md": fill_blocks(
            DOCS / "reference" / "json.md", streams=describe_json(), fields=json_block()
        ),
        DOCS / "measured.svg": curves(load()),
        DOCS / "small-models.md": fill_blocks(DOCS / "small-models.md", seen=real_model_block()),
        DOCS / "smollm2.svg": real_model_picture(),
        DOCS / "reference" / "reliability.md": reliability_page(),
        DOCS / "planning.md": fill_blocks(
            DOCS / "planning.md", checked=checked_block(), devices=devices_block(), published=summary_block()
        ),
        DOCS / "large-runs.md": fill_blocks(
            DOCS / "large-runs.md",
            dense=dense_block(),
            experts=experts_block(),
            published=summary_block(),
            constants=constants_block(),
            misses=misses_block(),
            figures=figures_block(),
        ),
    }


def find_outdated(files: dict[Path, str]) -> list[Path]:
    """Return the files that differ or are missing, and those that are generated no longer."""
    changed = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    old = {path for place in GENERATED for path in DOCS.glob(place)} - set(files)
    return changed + sorted(old)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only report the pages that are out of date")
    parser.add_argument(
        "--outputs", action="store_true", help="also run the code of the checked pages, and write what it prints"
    )
    arguments = parser.parse_args()
    if arguments.outputs:
        for path in CHECKED:
            path.write_text(run_code_blocks(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")
    files = generate_files()
    changed = find_outdated(files)
    if arguments.check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in changed)
        sys.exit(f"out of date: {names}: make docs" if changed else 0)
    for path in changed:
        if path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        else:
            path.unlink()


if __name__ == "__main__":
    main()
