"""`gsm8k` and `math`: documented examples, real solutions with their labels, properties, and hostile answers."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policygrad.errors import ConfigError
from policygrad.rewards.math import Gsm8k, Math, formulas, gsm8k, latex, math
from policygrad.rewards.math.extraction import POLICIES, extract
from policygrad.rewards.math.numbers import parse_quantity, parse_unit
from policygrad.rewards.resolve import find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not here")


def forms():
    rows = PAGE.partition("<!-- forms: begin -->")[2].partition("<!-- forms: end -->")[0].strip().splitlines()[2:]
    for row in rows:
        answer, completion, plain, formula, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        yield answer.strip("`"), completion.strip("`").replace(r"\n", "\n"), plain, formula


def value(answer):
    return json.loads(answer) if answer == "null" or answer.startswith(("[0", '["')) else answer


@pytest.mark.parametrize(("answer", "completion", "plain", "formula"), list(forms()))
def test_documented_examples(answer, completion, plain, formula):
    expected = {"1": 1.0, "0": 0.0, "none": None}
    assert gsm8k([""], [completion], answer=[value(answer)]) == [expected[plain]]
    assert math([""], [completion], answer=[value(answer)]) == [expected[formula]]


def test_docs_list_policies_and_defaults():
    table = PAGE.partition("| policy |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(POLICIES)
    for preset in (gsm8k, math):
        assert f"`{','.join(preset.policies)}`" in PAGE


@pytest.mark.parametrize(
    ("text", "policy", "result"),
    [
        ("a <answer>1</answer> <answer> 2 </answer>", "answer", "2"),
        ("<answer><answer>4</answer>", "answer", "4"),
        ("<answer>4", "answer", None),
        ("#### 1\n#### 2 x\nrest", "hashes", "2 x"),
        (r"\boxed{1} \boxed{\frac{1}{2}} {", "boxed", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", "boxed", r"a\}b"),
        (r"\boxed{1", "boxed", None),
        ("The answer is: **5**. I hope so.", "phrase", "**5**"),
        ("ANSWER: 3.5\nmore", "phrase", "3.5"),
        ("the answer is 6. No, the answer is 5.", "phrase", "5"),
        ("plan A is 7\nA: 8", "phrase", "8"),
        ("plan A is 7", "phrase", None),
        ("the answer is:\n5", "phrase", None),
        ("my answers are many", "phrase", None),
        (r"$1$ and \(2\) and \[3\]", "formula", "3"),
        ("it costs $5", "formula", None),
        ("from 3 to -4.", "last", "-4"),
        ("1,234.50 dollars", "last", "1,234.50"),
        ("50 \\% of", "last", "50%"),
        ("none", "last", None),
        ("x + 1", "line", "x + 1"),
        ("two\nlines", "line", None),
        ("it is a sentence", "line", None),
    ],
)
def test_extraction_policies(text, policy, result):
    assert extract(text, [policy]) == result


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", "1000"),
        ("1,00", None),
        ("1\u202f000", "1000"),
        (r"1\,000", "1000"),
        ("12,345,678.9", "123456789/10"),
        (".5", "1/2"),
        ("5.", "5"),
        ("$-5", "-5"),
        ("-$5", "-5"),
        ("--5", None),
        ("1/0", None),
        ("1e400", None),
        ("9" * 299, "9" * 299),
        ("9" * 301, None),
        ("5x", None),
        ("5 pi", None),
        ("5 or 6", None),
        ("5 apples", "5"),
        ("5 m/s", "5"),
        ("5!", None),
        ("", None),
    ],
)
def test_parse_quantity(text, number):
    result = parse_quantity(text)
    assert (result and result.value) == (number and Fraction(number))


@settings(max_examples=30)
@given(st.fractions(-(10**9), 10**9, max_denominator=10**4))
def test_equal_numbers_in_every_notation(number):
    n, d = number.numerator, number.denominator
    forms = [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", rf"$\dfrac{{{n}}}{{{d}}}$", f"{n:,}/{d}"]
    if d == 1:
        forms += [f"{n}", f"{n:,}", f"{n}.00", f"${n:,}", f"{n:,}".replace(",", "{,}"), f"{n} eggs"]
    full, rest = divmod(abs(n), d)
    if full and rest:
        forms += [f"{'-' * (n < 0)}{full} {rest}/{d}", rf"{'-' * (n < 0)}{full}\frac{{{rest}}}{{{d}}}"]
    for form in forms:
        for frame in ("#### {}", "<answer>{}</answer>", r"\boxed{{{}}}", "{}", "The answer is {}."):
            if frame == "{}" and "{,}" in form:
                continue  # without a mark it is LaTeX in a sentence, of which the last number is taken
            text = frame.format(form)
            assert gsm8k.score(text, f"{n}/{d}") == 1.0, text
            assert gsm8k.score(text, f"{n + d}/{d}") == 0.0, text


@given(st.text(alphabet=r"0123456789.,-+/*^${}\()[]<>#= %aexboxdfrcinty" + "\n", max_size=60))
@settings(max_examples=60)
def test_arbitrary_text_is_handled(text):
    assert gsm8k.score(text, "5") in (0.0, 1.0)
    assert gsm8k.score("5", text) in (0.0, 1.0, None)
    for policy in POLICIES:
        assert extract(text, [policy]) is None or isinstance(extract(text, [policy]), str)
    assert isinstance(latex.write_as_intervals(text), str)


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ("1 mile", "5280 feet", True),
        ("1 hour", "3600 s", True),
        ("1 square foot", "144 in^2", True),
        ("1 kg", "1 km", False),
    ],
)
def test_units_convert(mine, theirs, same):
    assert parse_quantity(mine).equals(parse_quantity(theirs)) is same


def test_suffixes_are_units_or_formulas():
    assert parse_unit("small red apples") == (True, None)
    assert parse_unit("sin x") == (False, None)
    assert parse_unit("x", glued=True) == (False, None)


WRITTEN = [  # reference, completion, reward
    ("$69$, $84$", r"\boxed{$69$, $84$}", 1.0),
    ("$69$, $84$", r"\boxed{84, 69}", 1.0),
    ("$69$, $84$", "The answer is $69$, $84$.", 1.0),
    ("$69$ and $84$", "The answer is $69$ and $84$.", 1.0),
    ("$69$, $84$", r"\boxed{69, 85}", 0.0),
    ("$69$, $84$", r"\boxed{84}", 0.0),
    ("$1$,$234$", r"\boxed{1234}", 0.0),
    (r"\(3\), \(5\)", "<answer>5, 3</answer>", 1.0),
    ("$(1,2)$, $(3,4)$", r"\boxed{(3,4), (1,2)}", 1.0),
    ("$(1,2)$, $(3,4)$", r"\boxed{(3,4), (2,1)}", 0.0),
    ("10:30 p.m.", r"\boxed{10:30 a.m.}", 0.0),
    ("10:30 p.m.", r"\boxed{10:30 p.m.}", 1.0),
    ("10:30 p.m.", r"\boxed{10:30\text{ PM}}", 1.0),
    ("10:30 p.m.", r"\boxed{22:30}", 1.0),
    ("10:30 p.m.", r"\boxed{10:30}", 1.0),
    ("10:30 p.m.", r"\boxed{10:31 p.m.}", 0.0),
    (r"5\text{ p.m.}", r"\boxed{5 a.m.}", 0.0),
    (r"5\text{ p.m.}", "The answer is 5:00 p.m.", 1.0),
    ("10:30", r"\boxed{10:30}", 1.0),
    ("1:3", r"\boxed{1:4}", 0.0),
    ("12:15 a.m.", r"\boxed{0:15}", 1.0),
    ("12:15 p.m.", r"\boxed{12:15}", 1.0),
    ("12:15 p.m.", r"\boxed{0:15}", 0.0),
    ("4343_9", r"\boxed{4343_9}", 1.0),
    ("4343_9", r"\boxed{4343_{9}}", 1.0),
    ("4343_9", r"\boxed{4343_8}", 0.0),
    ("4343_9", r"\boxed{4343}", 1.0),
    ("4343_9", r"\boxed{4334_9}", 0.0),
    ("4343_9", r"\boxed{3210}", 0.0),
    ("4343_6", r"\boxed{4343_{\text{six}}}", 1.0),
    ("4343_6", r"\boxed{4343_{\text{seven}}}", 0.0),
    ("2A_{16}", r"\boxed{2a_{16}}", 1.0),
    ("2A_{16}", r"\boxed{2B_{16}}", 0.0),
    ("4343_{9}", r"\boxed{43439}", 0.0),
    ("101_2", r"\boxed{202}", 0.0),
    ("10_9", r"\boxed{90}", 0.0),
    ("x_1", r"\boxed{x_2}", 0.0),
    (r"3 \text{ inches}^5", r"\boxed{3\text{ inches}^5}", 1.0),
    (r"3\text{ inches}^5", r"\boxed{3\text{ inches}^2}", 0.0),
    (r"3\text{ inches}^5", r"\boxed{3}", 1.0),
    (r"3\text{ inches}^5", r"\boxed{4\text{ inches}^5}", 0.0),
    ("3 inches^{5}", r"\boxed{3 in^5}", 1.0),
    ("36 cm^4", r"\boxed{36\text{ cm}^4}", 1.0),
    (r"36\mbox{ inches}^2", r"\boxed{36}", 1.0),
    (r"3\text{ inches}^5", r"\boxed{3\text{ inches}}", 0.0),
    (r"1\text{ foot}^4", r"\boxed{20736\text{ inches}^4}", 1.0),
    ("x = y+1", r"\boxed{y+1 = x}", 1.0),
    ("y = 2x+3", r"\boxed{2x + 3 = y}", 1.0),
    ("y = 2x+3", r"\boxed{2x + 4 = y}", 0.0),
    ("x = y", r"\boxed{y = x}", 1.0),
    ("2x+3y = 5", r"\boxed{5 = 2x+3y}", 1.0),
    ("2x+3y = 5", r"\boxed{5 = 3x+2y}", 0.0),
    ("x=5", r"\boxed{5 = x}", 1.0),
    ("5", r"\boxed{5 = x}", 1.0),
    ("5", r"\boxed{6 = x}", 0.0),
    ("x^2+y^2=1", r"\boxed{1=y^2+x^2}", 1.0),
    ("x^2+y^2=1", r"\boxed{1=y^2-x^2}", 0.0),
    ("x = y+1", r"\boxed{y = x+1}", 0.0),
    ("f(x) = x^2", r"\boxed{x^2 = f(x)}", 1.0),
    ("2x+3y-5=0", r"\boxed{0=2x+3y-5}", 1.0),
    (r"\frac{x^2}{4}+y^2=1", r"\boxed{1 = y^2+\frac{x^2}{4}}", 1.0),
    ("3s^2", r"\boxed{3}", 0.0),
    ("3s^4", r"\boxed{3}", 0.0),
    ("a_{12}", r"\boxed{a}", 0.0),
    (r"10:30\text{ p.m.}", r"\boxed{10:30\text{ a.m.}}", 0.0),
    ("$x=1$, $y=2$", r"\boxed{$x=1$ and $y=2$}", 1.0),
    (r"x = \pm 5", r"\boxed{\pm 5 = x}", 1.0),
    ("x = y", r"\boxed{x}", 0.0),
    (r"(-\infty,3)", r"\boxed{3 > x}", 1.0),
    (r"(-\infty,3)", r"\boxed{x \le 3}", 0.0),
    (r"[\tfrac12, 0.75)", r"\boxed{\frac34 > x \geq 0.5}", 1.0),
    (r"[\tfrac12, 0.75)", r"\boxed{\frac34 \geq x > 0.5}", 0.0),
    (r"(-\infty,3)\cup(3,\infty)", r"\boxed{x < 3 \cup x > 3}", 1.0),
    (r"1 < x \le 2", r"\boxed{(1,2)}", 0.0),
    (r"x < y", r"\boxed{y < x}", 0.0),
    ("listen", r"\boxed{silent}", 0.0),  # not the product of the same letters
    ("1 or 2", r"\boxed{2 \mathrm{ or } 1}", 1.0),
]


@pytest.mark.parametrize(("answer", "completion", "reward"), WRITTEN)
def test_lists_times_bases_powers_of_units_and_equations(answer, completion, reward):
    assert math.score(completion, answer) == reward


EVERY = [(gsm8k, 1), (math, 20), pytest.param(math, 1, marks=pytest.mark.full)]  # function, every how many rows


@needs_data
@pytest.mark.parametrize(("function", "every"), EVERY)
def test_reference_solutions_of_gsm8k_score_one_and_changed_ones_zero(function, every):
    rows = [json.loads(line)["answer"] for line in (DATA / "gsm8k" / "test.jsonl").open()]
    assert len(rows) == 1319
    rows = rows[::every]
    assert function(rows, rows, answer=rows) == [1.0] * len(rows)

    def raised(result):
        return f"#### {int(result[1].replace(',', '')) + 1}"

    changed = [re.sub(r"#### *(-?[\d,]+)", raised, row) for row in rows]
    assert all(a != b for a, b in zip(rows, changed, strict=True))
    assert function(rows, changed, answer=rows) == [0.0] * len(rows)


@needs_data
@pytest.mark.parametrize(("function", "every"), EVERY)
def test_scores_agree_with_labels_of_real_solutions(function, every):
    rows = [json.loads(line) for line in (DATA / "gsm8k" / "model_solutions.jsonl").open()]
    cases = [(row["ground_truth"], row[key]) for row in rows for key in row if isinstance(row[key], dict)]
    assert len(cases) == 2640
    cases = cases[::every]
    golds = [truth.rpartition("A:")[2].strip() for truth, _ in cases]
    scores = function([""] * len(cases), [case["solution"] for _, case in cases], answer=golds)
    wrong = [
        (gold, case["solution"][-80:], score)
        for gold, (_, case), score in zip(golds, cases, scores, strict=True)
        if score != float(case["is_correct"])
    ]
    assert wrong == []  # the page says that there is none


@needs_data
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "<answer>{}</answer>",
        "The answer is ${}$.",
        r"So it is \[ \boxed{{{}}} \]",
        r"Therefore, it is $\boxed{{{}}}$.",
    ],
)
def test_math_references_equal_themselves(form, every):
    golds = [json.loads(line)["answer"] for line in (DATA / "math" / "problems.jsonl").open()][::every]
    scores = math([""] * len(golds), [form.format(gold) for gold in golds], answer=golds)
    assert [gold for gold, score in zip(golds, scores, strict=True) if score != 1.0] == []


LONG = 2_000_000
HOSTILE = [
    "<answer>9**9**9**9</answer>",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10^{1000000000}}",
    r"\boxed{(999999999)!}",
    r"\boxed{9!!!!}",
    r"\boxed{" * 200_000,
    r"\boxed{" + "{" * 200_000,
    r"\boxed{" + "{" * 100_000 + "}" * 100_001,
    r"\boxed{" + r"\frac{1}{" * 1000 + "2" + "}" * 1001,
    "x" * LONG,
    "1" * LONG,
    "$ " * (LONG // 2),
    "-" * LONG,
    "<answer>" * (LONG // 8),
    "answer is " * (LONG // 10),
    "1e999999999",
    "\ud800",
    "\0",
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_answers_score_zero_quickly(number):
    assert gsm8k.score(HOSTILE[number], "7") == 0.0
    assert math.score(HOSTILE[number], r"\sqrt{7}") == 0.0


@pytest.mark.full  # that the pool ends what no signal ends, tests of the pool show
def test_an_endless_parse_costs_its_sample_only():
    """No alarm gets through while one long number is computed: the pool's timeout ends it, and the next sample is scored."""
    texts = [r"\boxed{9^{\frac{9^{9999}}{1}}}", r"\boxed{\binom{999999999}{499999999}}", r"\boxed{\sqrt{7}}"]
    with RewardPool(["math"], num_workers=1, timeout=5.0) as pool:
        scores = pool.score([""] * 3, texts, {"answer": [r"\sqrt{7}"] * 3})
    assert scores.total[2] == 1.0
    assert all(total in (0.0, None) for total in scores.total[:2])
    assert sum(scores.failures.values()) == scores.total.count(None)


def test_custom_policies():
    assert resolve_reward("gsm8k:hashes,last").function == Gsm8k(("hashes", "last"))
    assert resolve_reward("math:boxed*0.5").function == Math(("boxed",))
    assert resolve_reward("math:boxed*0.5").weight == 0.5
    assert find_code("gsm8k:hashes") == ()
    assert resolve_reward("gsm8k:boxed").function([""], ["#### 5"], answer=["5"]) == [0.0]
    with pytest.raises(ConfigError, match="unknown extraction policy 'box'; choose from answer, hashes"):
        resolve_reward("gsm8k:box")
    with pytest.raises(ConfigError, match="no extraction policy is given"):
        resolve_reward("math:")


def test_gsm8k_needs_neither_math_verify_nor_sympy():
    code = (
        "import sys; sys.modules['math_verify'] = sys.modules['sympy'] = None\n"
        "from policygrad.rewards.math import gsm8k\n"
        "print(gsm8k([''], ['#### 1,000'], answer=['1000']), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[1.0] False\n"


def test_formulas_are_compared_in_any_thread():
    def score():
        return [
            math(["x"], [rf"\boxed{{{given}}}"], answer=["\\frac{1}{\\sqrt{2}}"])
            for given in (r"\frac{\sqrt{2}}{2}", "x")
        ]

    with ThreadPoolExecutor(2) as threads:
        results = [future.result() for future in [threads.submit(score) for _ in range(2)]]
    assert results == [score()] * 2 == [[[1.0], [0.0]]] * 2


def test_a_comparison_in_another_thread_is_stopped_and_the_next_one_works(monkeypatch):
    comparer = formulas._Comparer()
    monkeypatch.setattr(formulas, "_BOOT", "import sys; print('true', flush=True); sys.stdin.read()")  # answers once
    monkeypatch.setattr(formulas, "COMPARISON_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError, match=r"comparing '0\.5' with '1/2' took more than 0\.05 seconds"):
        comparer("1/2", "0.5")
    monkeypatch.undo()
    assert comparer(r"\frac{1}{2}", "0.5")
    assert not comparer(r"\frac{1}{2}", r"\frac{1}{3}")
