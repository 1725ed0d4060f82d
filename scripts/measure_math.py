"""Counts what the reward `math`, and math-verify alone, say of right answers written in other ways and of wrong ones.

python scripts/measure_math.py [--data ../shared/data]     some three minutes of CPU

References are GSM8K's 1,319 numbers and the 250 answers of MATH-500 in the data folder. Each is written in other ways that
leave its value as it is, and changed in ways that do not; nothing is left to chance. An answer that is changed back to its
reference's text is left out. Each answer stands in one of three sentences, in turn. math-verify reads the completion as its
README has it: `parse` of the reference between dollar signs and of the completion, then `verify`. Results:
docs/results/math_rewards.json; the page is written by scripts/make_docs.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from policygrad.rewards.math import math

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "math_rewards.json"
SHOWN = 12
"""Examples of each error that the report keeps."""

FRAMES = (r"So it is \boxed{{{}}}.", "The answer is ${}$.", "Therefore\n\\[ \\boxed{{{}}} \\]")
INTEGER = re.compile(r"-?\d+\Z")
FIGURE = re.compile(r"(?<![\d.,_^{])\d+(?![\d.,]*\d)")
PLAIN = re.compile(r"[\d\s+*/().,a-z-]+\Z")
POINT = re.compile(r"\((-?[^,()\[\]]+),\s*(-?[^,()\[\]]+)\)\Z")
SUM = re.compile(r"(?P<a>[^-+=<>,&]+) ?\+ ?(?P<b>[^-+=<>,&]+)\Z")
EQUATION = re.compile(r"(?P<a>[^=<>,]+)=(?P<b>[^=<>,]+)\Z")

Rewrite = Callable[[str], str | None]


def _integer(write: Callable[[int], str]) -> Rewrite:
    return lambda answer: write(int(answer)) if INTEGER.match(answer) else None


def _replaced(old: str, new: str) -> Rewrite:
    return lambda answer: answer.replace(old, new) if old in answer else None


def _sum_turned(answer: str) -> str | None:
    result = SUM.match(answer)
    balanced = result and all(result[side].count("{") == result[side].count("}") for side in "ab")
    full = balanced and all(result[side].count("(") == result[side].count(")") for side in "ab")
    return f"{result['b'].strip()} + {result['a'].strip()}" if result and full else None


def _equation_turned(answer: str) -> str | None:
    result = EQUATION.match(answer)
    return f"{result['b'].strip()} = {result['a'].strip()}" if result else None


RIGHT: dict[str, Rewrite] = {
    "as it is": lambda answer: answer,
    "1,234": _integer(lambda n: f"{n:,}" if abs(n) > 999 else ""),
    r"1{,}234": _integer(lambda n: f"{n:,}".replace(",", "{,}") if abs(n) > 999 else ""),
    r"1\,234": _integer(lambda n: f"{n:,}".replace(",", r"\,") if abs(n) > 999 else ""),
    "18.00": _integer(lambda n: f"{n}.00"),
    r"\frac{36}{2}": _integer(lambda n: rf"\frac{{{2 * n}}}{{2}}"),
    "36/2": _integer(lambda n: f"{2 * n}/2"),
    "9 + 9": _integer(lambda n: f"{n - 7} + 7" if n > 7 else ""),
    "x = 18": _integer(lambda n: f"x = {n}"),
    "18 = x": _integer(lambda n: f"{n} = x"),
    r"\$18": _integer(lambda n: rf"\${n}"),
    r"18\text{ apples}": _integer(lambda n: rf"{n}\text{{ apples}}"),
    r"\mathbf{18}": _integer(lambda n: rf"\mathbf{{{n}}}"),
    r"1.8 \times 10^1": _integer(lambda n: rf"{n // 10}.{n % 10} \times 10^1" if n > 9 else ""),
    r"\dfrac": _replaced(r"\frac", r"\dfrac"),
    r"\tfrac": _replaced(r"\frac", r"\tfrac"),
    r"\left( \right)": lambda a: (
        a.replace("(", r"\left(").replace(")", r"\right)") if "(" in a and r"\left" not in a else None
    ),
    "blanks": lambda a: (
        re.sub(r"([-+=,])", r" \1 ", a)
        if re.search(r"[-+=,]", a) and "text" not in a and "{," not in a and ",\\!" not in a
        else None
    ),
    "b + a": _sum_turned,
    "equation turned around": _equation_turned,
    r"\displaystyle": lambda a: rf"\displaystyle {a}" if "\\" in a and "text" not in a else None,
    r"\! and \,": lambda a: rf"\!{a}\," if not INTEGER.match(a) else None,
}
"""Ways of writing the same; None or nothing where one does not apply."""


def _figure(change: Callable[[int], int], last: bool = False) -> Rewrite:
    """One figure of an answer changed: not an exponent, nor a subscript, nor a part of a longer number."""

    def write(answer: str) -> str | None:
        result = list(FIGURE.finditer(answer))
        if not result or "text" in answer:
            return None
        one = result[-1 if last else 0]
        return answer[: one.start()] + str(change(int(one[0]))) + answer[one.end() :]

    return write


WRONG: dict[str, Rewrite] = {
    "one more": _integer(lambda n: str(n + 1)),
    "one less": _integer(lambda n: str(n - 1)),
    "the other sign": _integer(lambda n: str(-n) if n else ""),
    "ten times": _integer(lambda n: str(10 * n) if n else ""),
    "a half more": _integer(lambda n: f"{n}.5" if n >= 0 else ""),
    "figures turned": _integer(lambda n: str(n)[::-1] if n > 9 and n % 10 else ""),
    "a last figure more": _integer(lambda n: f"{n}7"),
    "two answers": _integer(lambda n: rf"{n} \text{{ or }} {n + 1}"),
    "a variable behind": _integer(lambda n: f"{n}x" if n else ""),  # 0x is 0
    r"\sqrt": _integer(lambda n: rf"\sqrt{{{n}}}" if n > 1 else ""),
    "the first figure": _figure(lambda n: n + 1),
    "the last figure": _figure(lambda n: n + 1, last=True),
    "minus": lambda a: None if INTEGER.match(a) or "text" in a or a[0] in "-([{" or "=" in a else f"-({a})",
    "doubled": lambda a: None if INTEGER.match(a) or "text" in a or a[0] in "([{" or "=" in a else f"2({a})",
    "plus one": lambda a: None if INTEGER.match(a) or "text" in a or a[0] in "([{" or "=" in a else f"{a} + 1",
    "a point's coordinates": lambda a: (
        f"({result[2].strip()},{result[1].strip()})" if (result := POINT.match(a)) else None
    ),
    "another end": lambda a: f"[{a[1:]}" if a[:1] == "(" and a[-1:] == ")" and "infty" in a else None,
}
"""Ways of making it wrong."""


def references(data: Path) -> dict[str, list[str]]:
    """The right answers, by data set."""
    gsm8k = [json.loads(line)["answer"] for line in (data / "gsm8k" / "test.jsonl").open(encoding="utf-8")]
    problems = [json.loads(line)["answer"] for line in (data / "math" / "problems.jsonl").open(encoding="utf-8")]
    return {"GSM8K": [text.rpartition("####")[2].strip().replace(",", "") for text in gsm8k], "MATH": problems}


def other(answers: Sequence[str], place: int) -> str | None:
    """The next answer of the data set that has other figures and other letters, and so another value."""

    def parts(text: str) -> frozenset[str]:
        return frozenset(re.findall(r"\d+|[a-zA-Z]+", text))

    candidates = (answers[(place + step) % len(answers)] for step in range(1, len(answers)))
    mine = parts(answers[place])
    return next(
        (text for text in candidates if not parts(text) & mine and not (INTEGER.match(text) and not mine)), None
    )


def cases(answers: Sequence[str], rewrites: dict[str, Rewrite]) -> Iterator[tuple[str, str, str]]:
    """(rewriting, reference, answer) of every rewriting that applies."""
    for place, answer in enumerate(answers):
        seen = set() if rewrites is RIGHT else {answer}
        for name, rewrite in rewrites.items():
            text = rewrite(answer)
            if text and text not in seen:
                seen.add(text)
                yield name, answer, text
        if rewrites is WRONG and (text := other(answers, place)) and text not in seen:
            yield "another problem's", answer, text


def by_math_verify(reference: str, completion: str) -> bool:
    """As its README has it."""
    import math_verify

    return bool(math_verify.verify(math_verify.parse(f"${reference}$"), math_verify.parse(completion)))


def by_policygrad(reference: str, completion: str) -> bool:
    return math.score(completion, reference) == 1.0


JUDGES = {"policygrad": by_policygrad, "math_verify": by_math_verify}


def measure(answers: Sequence[str], rewrites: dict[str, Rewrite], right: bool) -> list[dict[str, Any]]:
    """By rewriting: how many answers, and of how many each judge says what is not so, with examples."""
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, reference, text) in enumerate(cases(answers, rewrites)):
        row = rows.setdefault(name, {"name": name, "answers": 0, "errors": dict.fromkeys(JUDGES, 0), "examples": {}})
        row["answers"] += 1
        completion = FRAMES[number % len(FRAMES)].format(text)
        for judge, says in JUDGES.items():
            if says(reference, completion) is not right:
                row["errors"][judge] += 1
                kept = row["examples"].setdefault(judge, [])
                if len(kept) < SHOWN:
                    kept.append([reference, completion])
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", choices=["GSM8K", "MATH"], help="this data set; the other's results stay")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    math.reward_prepare()
    result: dict[str, Any] = {"right": {}, "wrong": {}}
    if args.only and RESULTS.is_file():
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
    result["measured_by"] = "python scripts/measure_math.py"
    result["versions"] = {name: version(name) for name in ("policygrad", "math-verify", "sympy")}
    for data, answers in references(args.data).items():
        if args.only not in (None, data):
            continue
        for kind, rewrites in (("right", RIGHT), ("wrong", WRONG)):
            result[kind][data] = measure(answers, rewrites, kind == "right")
            total = sum(row["answers"] for row in result[kind][data])
            errors = {judge: sum(row["errors"][judge] for row in result[kind][data]) for judge in JUDGES}
            print(f"{data}, {kind}: {total:,} answers, errors {errors}", flush=True)
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
