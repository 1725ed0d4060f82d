"""Byte-level BPE tokenizers of one's own, which cut text before they merge as well-known ones do."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.models.tokenizer import Tokenizer
from policygrad.weight_sync.gguf import LLAMA, QWEN

END, BEGIN, TURN, CALL = "<|im_end|>", "<|begin|>", "<|im_start|>", "<tool_call>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "1 + 12 = 13, 1234567 and 3.14159, ٣٤ ²½",
    "  two spaces,   three\tand\t\ttabs \n\n\n new lines \r\n of both kinds  \n",
    "I'll say it's what they've DON'T and he'd said 'twas",
    "naïve café, Ærøskøbing, Ελληνικά, русский текст, हिन्दी, 中文字符，日本語のテキスト 한국어",
    "🙂🚀 👩‍👩‍👧 e\u0301 combining, ﷽ \u200b\ufeff",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # ok?\n",
    "https://example.org/a?b=c&d=%20e#f --- ==== ### !!! ...",
    "",
    " ",
    "\n",
    "a unmergeable word, and unmergeable",
    f"{TURN}user\nhi{END}\n{TURN}assistant\n{CALL}{{}}",
)
"""What differs between them, or is hard in another way."""
WHOLE = "Ġunmergeable"
"""A token that no merges make."""


def cuts() -> dict[str, Any]:
    """llama.cpp's names of pre-tokenizers, and those."""
    from tokenizers import Regex, pre_tokenizers

    def split(pattern: str) -> Any:
        parts = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        return pre_tokenizers.Sequence(parts)  # type: ignore[arg-type]

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([digits, words]),
        "qwen2": split(QWEN),
        "llama-bpe": split(LLAMA),
        "dbrx": split(LLAMA),
    }


def tokenizer(cut: str, begins: bool = False) -> Tokenizer:
    """One that cuts so; begins: with a token before every text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    written = json.loads(_trained())
    written["model"]["vocab"][WHOLE] = len(written["model"]["vocab"])
    written["model"]["ignore_merges"] = cut == "llama-bpe"
    backend = Backend.from_str(json.dumps(written))
    backend.pre_tokenizer = cuts()[cut]
    backend.add_tokens([CALL])
    if begins:
        number = backend.token_to_id(BEGIN)
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, number)]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, bos_token=BEGIN)
    hf.chat_template = TEMPLATE
    return Tokenizer(hf, frozenset([hf.eos_token_id]), cut, None)


@cache
def _trained() -> str:
    """Merges of text that was not cut at all, so that every cut keeps some of them apart; of the last two texts none."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    output = [*TEXTS[:-2] * 3, (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[END, BEGIN, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(output, trainer)
    return backend.to_str()


def changed(own: Tokenizer, **parts: Any) -> Tokenizer:
    """The same with other parts of its tokenizer.json; those of `model` one by one."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    written = json.loads(own.hf.backend_tokenizer.to_str())
    model = written["model"] | parts.pop("model", {})
    backend = Backend.from_str(json.dumps(written | parts | {"model": model}))
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=own.hf.eos_token, bos_token=own.hf.bos_token)
    return Tokenizer(hf, own.end_ids, own.name, None)
