"""Optimizers by name: `--optimizer.name muon`. A row is data, readable without torch; its module is imported when it is used."""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.errors import ConfigError
from policygrad.planning.model_sizes import ADAMW_MOMENT_BYTES, EIGHT_BIT_MOMENT_BYTES
from policygrad.utils.plugins import find_plugin, list_plugin_names, load_plugin

ADAMW = "adamw"


@dataclass(frozen=True)
class OptimizerRow:
    """What is known of an optimizer before it is built."""

    target: str
    """module:FUNCTION, called with (model, masters by name, OptimizerConfig, learning rate). It returns optimizers of torch, each
    with the masters that it updates; together they have every master once."""
    options: frozenset[str]
    """Those of `OPTIONS` that act."""
    moment_bytes: float
    """Bytes of moments per parameter of a hidden matrix."""
    other_moment_bytes: float = 0.0
    """Bytes of moments per parameter of embeddings and output head, if they differ; 0 = `moment_bytes`."""
    momentum_bytes: float = 0.0
    """Bytes of moments per parameter that momentum adds; 0 = none, or they are counted already."""
    has_adamw_lr: bool = True
    """A learning rate of AdamW suits it."""
    splits_layers: bool = True
    """It works where several processes share a matrix (tensor parallelism)."""

    def count_moment_bytes(self, momentum: float, *, hidden: bool = True) -> float:
        """Return the bytes of moments per parameter, of hidden matrices or of embeddings and output head."""
        moments = self.moment_bytes if hidden or not self.other_moment_bytes else self.other_moment_bytes
        return moments + (self.momentum_bytes if momentum else 0.0)


OPTIONS = ("betas", "eps", "momentum")
"""Options of `OptimizerConfig` that do not act in every optimizer."""
_ADAMW_OPTIONS = frozenset({"betas", "eps"})

OPTIMIZERS = {
    ADAMW: OptimizerRow("policygrad.learners.local.optimizer:build_adamw", _ADAMW_OPTIONS, ADAMW_MOMENT_BYTES),
    "adamw8bit": OptimizerRow(
        "policygrad.learners.local.adamw_8bit:build_adamw_8bit",
        _ADAMW_OPTIONS,
        moment_bytes=EIGHT_BIT_MOMENT_BYTES,
        splits_layers=False,
    ),
    "muon": OptimizerRow(
        "policygrad.learners.local.muon:build_muon",
        frozenset(OPTIONS),
        moment_bytes=4,
        other_moment_bytes=8,
        splits_layers=False,
    ),
    "sgd": OptimizerRow(
        "policygrad.learners.local.optimizer:build_sgd",
        frozenset({"momentum"}),
        moment_bytes=0,
        momentum_bytes=4,
        has_adamw_lr=False,
    ),
}


def find_optimizer(name: str) -> OptimizerRow:
    """Return the row of a name, which may be an installed package's. Raises ConfigError for an unknown one."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    plugin = find_plugin("optimizer", name)
    if plugin is None:
        choices = ", ".join((*OPTIMIZERS, *list_plugin_names("optimizer")))
        raise ConfigError(f"optimizer.name must be one of {choices}, not {name!r}")
    row = load_plugin(plugin)
    if not isinstance(row, OptimizerRow):
        raise ConfigError(
            f"optimizer.name={name}: {plugin.target} of {plugin.package} is no OptimizerRow but {type(row).__name__}"
        )
    return row
