"""Rewards for mathematical answers: `gsm8k` for numbers, `math` for formulas too."""

from policygrad.rewards.math.expressions import check_installed
from policygrad.rewards.math.grading import Math, math
from policygrad.rewards.math.gsm8k import Gsm8k, gsm8k

__all__ = ["Gsm8k", "Math", "check_installed", "gsm8k", "math"]
