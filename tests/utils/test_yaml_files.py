"""A configuration in YAML is read as the same keys in TOML, and what YAML has beyond that is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from policygrad.errors import ConfigError
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import load_config

TOML = """
steps = 2
lr = 1e-6
seed = 10
task = "on.jsonl"
track = ["wandb", "trace"]
[algorithm]
name = "grpo"
critic = "none"
[algorithm.gate]
low = 0.1
[[algorithm.terms]]
part = "KLToReference"
beta = 1e-3
[learner]
compile = true
"""
YAML = """
# as people write it
steps: 2
lr: 1e-6
seed: 010
task: on.jsonl
track: [wandb, trace]
output: null
algorithm:
  name: grpo
  critic: null
  gate: {low: 0.1}
  terms:
    - part: KLToReference
      beta: .001
learner:
  compile: True
"""


def load(folder: Path, name: str, text: str) -> UncheckedRun:
    (folder / name).write_text(text, encoding="utf-8")
    return load_config(folder / name, UncheckedRun())


def test_yaml_means_what_the_same_toml_means(tmp_path: Path) -> None:
    assert load(tmp_path, "run.yaml", YAML) == load(tmp_path, "run.toml", TOML) == load(tmp_path, "run.YML", YAML)
    assert load(tmp_path, "empty.yaml", "# nothing\n") == UncheckedRun()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: [1", "cannot be read as a configuration: expected ',' or ']'"),
        ("steps: 1\nsteps: 2", "the key 'steps' is there twice; keep one (line 2)"),
        ("1: 2", "the key '1' is not text"),
        ("steps: &a 1\nseed: *a", "anchors and aliases are not read: write the value out (line 1)"),
        ("steps: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("hello", "it holds no keys at its top"),
        ("learner: {offload: on}", "'learner.offload' must be true or false, not 'on'"),
        ("steps: null", "'steps' must be a whole number, not None"),
        ("stops: 1", "unknown key 'stops': did you mean 'steps'?"),
        (f"steps: {'[' * 200}{']' * 200}", "nested deeper than"),
    ],
)
def test_what_no_configuration_has_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "run.yaml", text)
    assert says in str(refused.value)
    assert "run.yaml" in str(refused.value)


def test_without_a_parser_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"needs PyYAML: pip install pyyaml, or write the file as TOML"):
        load(tmp_path, "run.yaml", YAML)
