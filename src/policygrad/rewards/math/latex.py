"""LaTeX and typography of an answer brought to one form, as text: nothing is read as mathematics here."""

import re

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_GLYPHS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8)}
_GLYPH = re.compile("[" + "".join(_GLYPHS) + "]")
_WORDS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_MARKS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "~": " ", "∞": r"\infty "})
_SPACED = re.compile(r"(?<!\\)\\(?:[!,;: ]|(?:left|right|displaystyle)(?![A-Za-z]))")
_JOINED = re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\}\\?!?|,\\!|\u2009|\u202f)(?=\d{3}(?!\d))")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)|\\frac\s*(\d)\s*(?=\{)|\\frac(\{[^{}]*\})\s*(\d)")
_FORMULA = r"(?:(?<!\\)\$[^$]{1,300}(?<!\\)\$|\\\((?:[^\\]|\\[^)]){1,300}\\\))"
_LISTED = re.compile(rf"{_FORMULA}(?:\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*{_FORMULA}){{1,50}}")
_BETWEEN = re.compile(r"(?:(?<=\$)|(?<=\\\)))\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*(?=\$|\\\()")


def tidy(text: str) -> str:
    """An answer without what has no meaning: delimiters, bold, spacing commands, the full stop at its end."""
    text = text.translate(_MARKS).strip().strip("*_`").strip()
    if _LISTED.fullmatch(listed := text.rstrip(".,;: ")):  # $69$, $84$
        text = re.sub(r"(?<!\\)\$|\\[()]", "", _BETWEEN.sub(", ", listed))
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        bare = left not in inner.replace(r"\$", "")
        if inner and bare and text.startswith(left) and text.endswith(right):
            text = inner
    text = _JOINED.sub(lambda found: ",", text)
    text = _SPACED.sub(" ", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace(r"^{\circ}", " degrees").replace(r"^\circ", " degrees")
    text = _SHORT_FRACTION.sub(_braced, text.replace("°", " degrees"))
    text = _GLYPH.sub(lambda found: " " + "/".join(map(str, _GLYPHS[found[0]])), text)
    return " ".join(text.split()).rstrip(".,;: ").strip("*_` ")


def words(text: str) -> str:
    """A tidy text with what stands in \\text{…} and its kin as plain words."""
    return _WORDS.sub(r" \1", text).strip()


def _braced(found: re.Match[str]) -> str:
    """\\frac12, \\frac1{2} and \\frac{1}2 with all their braces."""
    if found[1]:
        return rf"\frac{{{found[1]}}}{{{found[2]}}}"
    return rf"\frac{{{found[3]}}}" if found[3] else rf"\frac{found[4]}{{{found[5]}}}"
