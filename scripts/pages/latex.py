"""Formulas as LaTeX, from the one line of Unicode that the terminal shows: `Â_i = (R_i − mean_g R)/std_g R`.

The site typesets every block of Markdown that is marked `formula` (docs/conf.py); the pages themselves and `policygrad show` keep
the line.
"""

from __future__ import annotations

import re
import unicodedata

COMMANDS = dict(
    pair.split(" ", 1)
    for pair in r"""
∇ \nabla   Σ \sum   Π \prod   · \cdot   × \times   − -   ≤ \le   ≥ \ge   ≠ \ne   ≈ \approx   ∈ \in   ∼ \sim
~ \sim   ‖ \Vert   ← \leftarrow   ⌊ \lfloor   ⌋ \rfloor   ± \pm   ∓ \mp   ℓ \ell   Δ \Delta   Ψ \Psi   α \alpha
β \beta   γ \gamma   δ \delta   ε \varepsilon   η \eta   θ \theta   λ \lambda   μ \mu   π \pi   ρ \rho
σ \sigma   τ \tau   φ \varphi   ω \omega   ₁ _1   ½ \tfrac12   ² ^{2}   ᵀ ^{\top}   ⁻¹ ^{-1}   ∞ \infty
… \ldots   # \#   % \%   { \{   } \}   ≡ \equiv   → \to   ξ \xi   ∂ \partial   ∪ \cup
""".replace("\n", "   ").split("   ")
    if pair
)
FUNCTIONS = {
    "min",
    "max",
    "clip",
    "exp",
    "log",
    "mean",
    "std",
    "cov",
    "sign",
    "sgn",
    "sg",
    "argmax",
    "KL",
    "GAE",
    "AdamW",
    "var",
}
ACCENTS = {"\u0302": r"\hat", "\u0303": r"\tilde", "\u0304": r"\bar"}
WIDEST = 84
"""Characters of a line that is broken at every wide space, not only where the formula has three."""
OPENING, CLOSING = "([{", ")]}"

_TOKEN = re.compile(
    r"(?P<number>\d[\d.,]*\d(?:e-?\d+)?|\d+(?:e-?\d+)?)|(?P<accented>\w[\u0302\u0303\u0304])|(?P<word>[A-Za-z@][A-Za-z@']+)"
    r"|(?P<abbreviation>s\.t\.)|(?P<script>[_^])|(?P<space>\s+)|(?P<inverse>⁻¹)|(?P<one>.)"
)


def to_latex(formula: str) -> str:
    """Translate a formula of one or several lines into LaTeX for display.

    Lines, and parts that three spaces separate, become lines of one aligned block, so that no line is wider than it must be.
    """
    rows = []
    for line in formula.strip("\n").splitlines():
        if line.strip():
            line = re.sub(r"^(\s*\S{1,3})\s{2,}=", r"\1 =", line)
            apart = r"\s{2,}|(?<=,) (?=or )" if len(line) > WIDEST else r"\s{3,}"
            first, *others = [part for part in re.split(apart, line.strip()) if part]
            if others and re.fullmatch(r"[a-z]{2,}", first):  # a label, such as `reward`
                first = f"{first}  {others.pop(0)}"
            rows += [translate(first), *(rf"\qquad {translate(part)}" for part in others)]
    return "\\begin{aligned}\n" + " \\\\\n".join(f"& {row}" for row in rows) + "\n\\end{aligned}"


def translate(text: str) -> str:
    """Translate one line, without a surrounding environment."""
    text = unicodedata.normalize("NFC", text)
    text = re.sub("[ÂÃŵāōĀŌ]|[A-Za-z][\u0302\u0303\u0304]", lambda match: unicodedata.normalize("NFD", match[0]), text)
    return _tall_brackets(" ".join(_symbols(_fractions(text)).split()))


def _tall_brackets(latex: str) -> str:
    """Brackets around a fraction or a sum grow with it."""
    opened: list[int] = []
    tall: dict[int, str] = {}
    for position, letter in enumerate(latex):
        if letter in "([":
            opened.append(position)
        elif letter in ")]" and opened:
            start = opened.pop()
            inside = latex[start:position]
            if re.search(r"\\(frac|sum|prod)", inside) and inside.count("{") == inside.count("}"):
                tall |= {start: r"\left", position: r"\right"}
    return "".join(tall.get(position, "") + letter for position, letter in enumerate(latex))


def _fractions(text: str) -> str:
    """Mark `a/b` as a fraction, \x01a\x02b\x03, where both sides are runs without a space outside brackets."""
    text = text.replace("ᵀFx", "ᵀF\x04x")
    glued = re.sub(r"\b((?:mean|std)(?:_\w+)?) (?=[A-Zr][\u0302\u0303_/),;+ ]|[A-Zr]$)", "\\1\x04", text)
    position = 0
    while (position := glued.find("/", position)) >= 0:
        left, right = _run(glued, position, -1), _run(glued, position, 1)
        above, below = glued[left:position], glued[position + 1 : right]
        if not above or not below or re.search(r"[ΣΠ](_\{[^}]*\}|_\w)?$", below):
            position += 1
            continue
        fraction = f"\x01{_bare(above)}\x02{_bare(below)}\x03"
        glued = glued[:left] + fraction + glued[right:]
        position = left + 1
    return glued.replace("\x04", " ")


def _run(text: str, start: int, step: int) -> int:
    """The end of the operand beside position `start`, in the direction of `step`."""
    inner, outer = (CLOSING + "\x03", OPENING + "\x01") if step < 0 else (OPENING + "\x01", CLOSING + "\x03")
    depth, bars, position = 0, 0, start + step
    while 0 <= position < len(text):
        letter = text[position]
        if letter in inner:
            depth += 1
        elif letter in outer:
            if depth == 0:
                break
            depth -= 1
        elif letter in "|":
            bars += 1
        elif (
            depth == 0
            and (letter in " ,;=+−/<>\x02" or (letter == "·" and step > 0))
            and not (letter == " " and bars % 2)
        ):
            break
        position += step
    return position + 1 if step < 0 else position


def _bare(operand: str) -> str:
    """Without brackets around all of it, which the fraction's line makes superfluous."""
    if operand.startswith("(") and _closing(operand, 0) == len(operand):
        return operand[1:-1].strip()
    return operand


def _symbols(text: str) -> str:
    """Every symbol as LaTeX; words between formulas as text."""
    parts: list[str] = []
    tokens = list(_TOKEN.finditer(text))
    index = 0
    while index < len(tokens):
        match = tokens[index]
        kind, value = match.lastgroup, match[0]
        index += 1
        if kind == "number":
            mantissa, _, exponent = value.partition("e")
            power = rf"10^{{{int(exponent)}}}" if exponent else ""
            parts.append(rf"{mantissa} \cdot {power}" if exponent and mantissa != "1" else power or mantissa)
        elif kind == "accented":
            parts.append(f"{ACCENTS[value[1]]}{{{value[0]}}}")
        elif kind == "abbreviation":
            parts.append(rf"\text{{ {value} }}")
        elif kind == "word" or (value == "a" and _is_article(text, match.start())):
            name = rf"\operatorname{{{value}}}" if value in FUNCTIONS else rf"\text{{ {value} }}"
            parts.append(name)
        elif kind == "script":
            content, index = _script(tokens, index)
            parts.append(f"{value}{{{content}}}")
        elif kind == "inverse":
            parts.append("^{-1}")
        elif kind == "space":
            parts.append(r"\quad " if len(value) > 1 else " ")
        elif value == "√":
            end = _run(text, match.start(), 1)
            stop = match.start() + 1
            inside = text[stop:end]
            following = _closing(text, stop) if inside.startswith("(") else end
            parts.append(rf"\sqrt{{{_symbols(text[stop + 1 : following - 1])}}}")
            while index < len(tokens) and tokens[index].start() < following:
                index += 1
        else:
            parts.append({"\x01": r"\frac{", "\x02": "}{", "\x03": "}"}.get(value, COMMANDS.get(value, value)) + " ")
    joined = "".join(parts)
    while (merged := re.sub(r"(\\text\{[^{}]*) \}\s*\\text\{ ", r"\1 ", joined)) != joined:
        joined = merged
    return joined


def _closing(text: str, start: int) -> int:
    """One past the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in OPENING) - (text[position] in CLOSING)
        if depth == 0:
            return position + 1
    return len(text)


def _script(tokens: list[re.Match[str]], index: int) -> tuple[str, int]:
    """What a subscript or superscript holds, and the index of the token after it."""
    if index >= len(tokens):
        return "", index
    text, first = tokens[0].string, tokens[index]
    if first[0] in "{(":
        end = _closing(text, first.start())
        content = _symbols(text[first.start() + 1 : end - 1])
        while index < len(tokens) and tokens[index].start() < end:
            index += 1
        return content, index
    end = index + 1
    if first[0] in "−-":
        end += 1
    if first[0] in FUNCTIONS and end < len(tokens) and tokens[end][0] == "(":
        stop = _closing(text, tokens[end].start())
        content = _symbols(text[first.start() : stop])
        while end < len(tokens) and tokens[end].start() < stop:
            end += 1
        return content, end
    content = text[first.start() : tokens[end - 1].end()]
    if tokens[end - 1].lastgroup == "word" and content not in FUNCTIONS:
        return rf"\text{{{content}}}", end
    return _symbols(content).strip(), end


def _is_article(text: str, position: int) -> bool:
    return text[position - 1 : position] == " " and re.match(r"a [A-Za-z]{2}", text[position:]) is not None
