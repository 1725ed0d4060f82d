"""Rewards for mathematical answers: `gsm8k` for numbers, `math` for formulas too."""

from policygrad.rewards.math.formulas import check_math_verify_installed
from policygrad.rewards.math.grading import Gsm8k, Math, gsm8k, math

__all__ = ["Gsm8k", "Math", "check_math_verify_installed", "gsm8k", "math"]
