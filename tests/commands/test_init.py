"""`policygrad init`: a configuration with comments that `train --config` reads, as it is and with every example in use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from policygrad.algorithms import ALGORITHMS
from policygrad.commands.help import load_page
from policygrad.commands.init import format_example
from policygrad.commands.train import parse_run
from policygrad.samplers.engines.registry import list_engine_names
from policygrad.training.config.run import Run, UncheckedRun
from policygrad.training.config.serialization import load_config


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Read the text of a configuration as `train --config` does."""

    def read(text: str) -> Run:
        file = tmp_path / "run.toml"
        file.write_text(text, encoding="utf-8")
        return parse_run(["--config", str(file)])[0]

    return read


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "trpo", "reinforce"])
def test_the_configuration_is_the_algorithm_with_its_defaults(load: Any, name: str) -> None:
    run = load(format_example(name))
    assert run.resolve() == Run(algorithm=ALGORITHMS[name]).resolve()


def test_parts_that_are_uncommented_are_the_algorithm_s(load: Any) -> None:
    """A cap that is infinite is null in what `show` prints, and inf here."""
    text = format_example("prime_rl")
    begin = text.index("[algorithm]")
    assert "# c = inf\n" in text
    run = load(text[:begin] + re.sub(r"^# ", "", text[begin:], flags=re.MULTILINE))
    assert run.algorithm == ALGORITHMS["prime_rl"]


@pytest.mark.full
def test_every_algorithm_has_one(tmp_path: Path) -> None:
    for name, algorithm in ALGORITHMS.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(format_example(name), encoding="utf-8")
        assert load_config(file, UncheckedRun()).algorithm == algorithm


def test_every_example_can_be_used(load: Any) -> None:
    text = re.sub(r"^# ", "", format_example("grpo"), flags=re.MULTILINE)
    run = load(text.replace("every = 0", "every = 5"))  # with an evaluation to choose the best model by
    assert run.track == ("wandb",)
    assert run.lr == 1e-6
    assert run.reward == ("mine.py:reward", "0.1*format")
    assert run.learner.lora.startswith("rank=16")
    assert run.sampler.engine == list_engine_names()[0]
    assert run.algorithm.gate == ALGORITHMS["grpo"].gate
    assert run.algorithm.terms == ALGORITHMS["grpo"].terms


def test_every_other_option_is_in_a_section_that_is_named() -> None:
    text, page = format_example("grpo"), load_page("train", "grpo")
    assert page is not None
    for section in page.sections:
        name = section.name.partition(".")[0]
        assert re.search(rf"\b{name}\b", text) or name == "cluster", name  # which no file sets


def test_a_users_own_algorithm(run_command: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import policygrad as pg\nMINE = pg.get_algorithm('rloo')\n", encoding="utf-8")
    code, out, _ = run_command("init", "mine.py:MINE")
    assert code == 0
    assert load(out).algorithm.advantage == ALGORITHMS["rloo"].advantage
    assert run_command("init", "gpro")[0] == 2
