"""What is said of one paper, and the two formulas that most of them share."""

from __future__ import annotations

from dataclasses import dataclass, field

CLIPPED = "min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â )"
ZSCORE = "Â_i = (R_i − mean_g R)/std_g R"


@dataclass(frozen=True)
class Paper:
    """The objective J that an algorithm's source maximises, in this package's notation, and the source of its numbers."""

    objective: str
    """Maximised; lines of plain text. r is π_θ/π_old of a token, s its geometric mean over a completion."""
    defaults: dict[str, str] = field(default_factory=dict)
    """`Part.setting` (or `samples_per_prompt`) -> where the default comes from. What is not here is the parent's where the
    value is the parent's, and otherwise our choice."""
    departs: str = ""
    """Where our row departs from what was published, in one line; "" = nowhere that we know."""
