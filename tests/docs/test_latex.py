"""Formulas of the terminal as LaTeX: by hand, and every formula of the matrix without an error."""

import re

import pytest

from pages.latex import COMMANDS, FUNCTIONS, to_latex, translate
from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG

STRUCTURE = {
    "begin",
    "end",
    "operatorname",
    "text",
    "frac",
    "tfrac",
    "sqrt",
    "hat",
    "tilde",
    "bar",
    "quad",
    "qquad",
    "top",
} | {
    "left",
    "right",
}


def squeezed(latex: str) -> str:
    return re.sub(r"\s+", "", latex)


@pytest.mark.parametrize(
    ("formula", "latex"),
    [
        ("Â_i = R_i − mean_g R", r"\hat{A}_{i} = R_{i} - \operatorname{mean}_{g} R"),
        ("(R_i − mean_g R)/std_g R", r"\frac{R_{i} - \operatorname{mean}_{g} R}{\operatorname{std}_{g} R}"),
        ("1/Σ_i|o_i| Σ_t r", r"\frac{1}{\sum_{i}|o_{i}|} \sum_{t} r"),
        ("Σ_j n_j R_j/Σ_j n_j", r"\sum_{j} n_{j} R_{j}/\sum_{j} n_{j}"),
        ("π_θ(o_t)/π_old(o_t)", r"\frac{\pi_{\theta}(o_{t})}{\pi_{\text{old}}(o_{t})}"),
        ("√( 2δ )·x", r"\sqrt{2\delta} \cdot x"),
        ("r^sgn(Â)", r"r^{\operatorname{sgn}(\hat{A})}"),
        ("e^−0.4", r"e^{-0.4}"),
        ("1e-05·u", r"10^{-5} \cdot u"),
        ("2e-4 N", r"2 \cdot 10^{-4} N"),
        ("r, or 0 where Ψ>0", r"r, \text{ or } 0 \text{ where } \Psi>0"),
        ("groups with a KL", r"\text{ groups with a } \operatorname{KL}"),
        ("c ( 1/G )", r"c \left( \frac{1}{G} \right)"),
        ("R/std R over all", r"\frac{R}{\operatorname{std} R} \text{ over all }"),
    ],
)
def test_translation_of_one_line(formula: str, latex: str) -> None:
    assert squeezed(translate(formula)) == squeezed(latex)


def test_lines_and_parts_become_rows_of_one_block() -> None:
    block = to_latex("  Ψ  = R\nreward    R += 1\nJ = r,   x = 1")
    assert [squeezed(row) for row in block.splitlines()] == [
        r"\begin{aligned}",
        r"&\Psi=R\\",
        r"&\text{reward}\quadR+=1\\",
        r"&J=r,\\",
        r"&\qquadx=1",
        r"\end{aligned}",
    ]


def test_every_formula_is_latex_without_leftover_signs() -> None:
    formulas = [f"{symbol} = {text}" for a in ALGORITHMS.values() for symbol, text in a.equation().items()]
    formulas += [CATALOG[name].objective for name in ALGORITHMS]
    for formula in formulas:
        latex = to_latex(formula)
        assert all(ord(letter) < 128 for letter in latex), latex
        braces = latex.replace(r"\{", "").replace(r"\}", "")
        assert braces.count("{") == braces.count("}"), formula
        assert len(re.findall(r"\\left[(\[]", latex)) == len(re.findall(r"\\right[)\]]", latex)), formula
        commands = set(re.findall(r"\\([A-Za-z]+)", latex))
        known = {command[1:] for command in COMMANDS.values()} | FUNCTIONS
        assert commands <= known | STRUCTURE, formula
