"""Weights for a server of llama.cpp, in float32, with as much of a vocabulary as token ids need."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.errors import EngineError, ModelError, install_command
from policygrad.models.tokenizer import Tokenizer
from policygrad.weight_sync.base import LazyStateDict
from policygrad.weight_sync.folder import WeightWriter, check_exportable, merge_adapters

# A model's shape and weights as GGUF, which llama.cpp reads.
#
# Names and metadata: ggml-org/ggml, docs/gguf.md, and the package `gguf`. llama.cpp turns neighbouring pairs (x₀, x₁) in a
# `llama`, transformers the halves (x_i, x_{i + d/2}): the rows of its q and k are put in that order; `qwen2` and `qwen3` turn
# halves in both.

_KINDS = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model_type to the architecture's name in `gguf`."""
_PAIRS = ("LLAMA",)
"""Architectures that turn neighbouring pairs."""


def explain_unsupported_model(model: Any) -> str:
    """Why a model of transformers' cannot be written; "" = it can."""
    config = model.config
    if config.model_type not in _KINDS:
        return f"llama.cpp is given models of the kinds {', '.join(_KINDS)}, and this one is a {config.model_type}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "the model's attention has a sliding window, which is not exported"
    kind = _rope(config).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        return f"the model stretches its positions by {kind!r}, which is not exported for llama.cpp"
    return ""


def import_gguf() -> Any:
    """The package `gguf`. Raises EngineError where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise EngineError(f"llama.cpp takes its weights as GGUF: {install_command('llama-cpp')}") from error
    return gguf


def count_embedding_rows(model: Any) -> int:
    """Ids that the model reads."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def open_gguf_writer(path: Path, model: Any, file_type: int = 0, *, spooled: bool = False) -> Iterator[Any]:
    """A writer that knows the model's shape; the file is written when the context ends, with what was put in meanwhile.

    file_type: of the weights, by `gguf.LlamaFileType`; 0 = float32. spooled: what was put in waits in a temporary file, not in
    memory.
    """
    gguf, config = import_gguf(), model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[_KINDS[config.model_type]]], spooled)
    _metadata(writer, config, count_embedding_rows(model), file_type)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weights(writer: Any, model: Any, tensors: Mapping[str, Tensor], *, bf16: bool = False) -> None:
    """The parameters by transformers' names. bf16: matrices are rounded to it; vectors stay in float32, as llama.cpp has them.

    Raises:
        EngineError: a parameter that the architecture has no place for.
    """
    gguf, config = import_gguf(), model.config
    kind = _KINDS[config.model_type]
    if (scaling := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", scaling)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], config.num_hidden_layers)
    for name, tensor in tensors.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise EngineError(f"llama.cpp's {kind.lower()} has no place for the parameter {name!r}")
        array = _array(name, tensor, config, kind)
        if bf16 and array.ndim > 1:
            rounded = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(found, gguf.quants.quantize(array, rounded), raw_dtype=rounded)
        else:
            writer.add_tensor(found, array)


def _array(name: str, tensor: Tensor, config: Any, kind: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in name), 0)
    if count and kind in _PAIRS:
        halves = found.reshape(count, 2, -1, *found.shape[1:])
        found = halves.swapaxes(1, 2).reshape(found.shape)
    return np.ascontiguousarray(found)


def _metadata(writer: Any, config: Any, size: int, file_type: int) -> None:
    width = _head_width(config)
    writer.add_vocab_size(size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(file_type)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found)


def _rope_factors(config: Any) -> NDArray[np.float32] | None:
    """What divides each frequency [head width / 2]; None = 1. Llama 3's, as transformers' modeling_rope_utils computes them."""
    rope, width = _rope(config), _head_width(config)
    if rope.get("rope_type", "default") == "default":
        return None
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    found = []
    for i in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / width)
        smooth = (old / length - low) / (high - low)
        if length < old / high:
            found.append(1.0)
        elif length > old / low:
            found.append(float(factor))
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


GGUF_FILE = "model.gguf"
_ENDS = ("eos", "eot", "eom")
"""End tokens that a vocabulary can name; a client cuts at any others."""


def make_gguf_writer(model: Any, end: frozenset[int]) -> WeightWriter:
    """model: transformers' own. end: ids that end a completion.

    Raises:
        EngineError: an architecture that is not written here, or the package `gguf` is missing.
    """
    check_exportable(model)
    if reason := explain_unsupported_model(model):
        raise EngineError(f"{reason}: take --sampler.engine vllm, or local")
    import_gguf()

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        with open_gguf_writer(folder / GGUF_FILE, model, spooled=isinstance(tensors, LazyStateDict)) as writer:
            _write_placeholder_vocabulary(writer, count_embedding_rows(model), end)
            add_weights(writer, model, merge_adapters(model, tensors))

    return write


def _write_placeholder_vocabulary(writer: Any, size: int, end: frozenset[int]) -> None:
    """Every token is called by its number: a server that is asked for ids says nothing of a token whose text is no whole UTF-8."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([import_gguf().TokenType.NORMAL] * size)
    writer.add_token_merges(["< 0"])  # a list that is empty is refused
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    for name, token in zip(_ENDS, sorted(end), strict=False):
        getattr(writer, f"add_{name}_token_id")(token)


# A byte-level BPE tokenizer in the terms of llama.cpp: tokens with their kinds, merges, and the name of what cuts a text first.
#
# Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`llm_tokenizer_bpe`: the expressions; `load`: what else a name stands for) and
# conversion/base.py (`get_vocab_base`: the kinds of tokens). A file names its pre-tokenizer and cannot bring its own expression, so
# what has no name there cannot be written.

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens: text in the letters that stand for bytes; what a template writes; a word that is never cut; nothing."""
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
QWEN, LLAMA = rf"{_WORDS}\p{{N}}{_END}", rf"{_WORDS}\p{{N}}{{1,3}}{_END}"
EMBEDDED = r"\d|\n|(?<=\p{L})-|</?answer>"
"""Of the embedded model. llama.cpp has no name for it, and where `_spared` holds it need not have one."""
_BYTES, _GPT2, _DIGITS = "bytes", "bytes by GPT-2's expression", "digits"
_NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((QWEN, _BYTES), False): "qwen2",
    ((LLAMA, _BYTES), True): "llama-bpe",
    ((LLAMA, _BYTES), False): "dbrx",
}
"""(steps of the pre-tokenizer, whether a word that is a token is taken whole) to llama.cpp's name for both."""
_NEVER = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
"""Letters of bytes that no UTF-8 holds (RFC 3629), which a tokenizer need not know."""
_RARE = frozenset(chr(byte + 256) for byte in range(32) if chr(byte) not in "\t\n\v\f\r") | frozenset(
    map(chr, (0xF1, 0xF2, 0xF3, 0xF4))
)
"""Letters of control characters, and of bytes that begin characters above U+3FFFF, which a vocabulary may lack (SmolLM2's lacks
eight): the tokenizer and llama.cpp both leave such a byte out. They may differ in the merges beside it, within a run of
punctuation."""
_UNCUT = "superbpe"
"""Cuts at digits alone."""
_SPARED = re.compile(r"(?:Ġ-?|[!-,./:-~])+")
"""Tokens across which `EMBEDDED_MODEL` never cuts: no digit, no line's end, and a hyphen only behind a space."""


@dataclass(frozen=True)
class BytePairVocabulary:
    """What llama.cpp is told of a tokenizer."""

    tokens: tuple[str, ...]
    """By their ids, as many as the model reads."""
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    """`LEFT RIGHT`, the first one first."""
    pre_tokenizer: str
    """The pre-tokenizer's name."""
    adds_bos_eos: tuple[bool, bool]
    """Whether the token that begins, and the one that ends, are put around a text."""
    special: Mapping[str, int]
    """bos, eos, eot, eom, pad, unk: ids of those that there are."""
    template: Any = None
    """The chat template; or several, each a dict with name and template."""


def extract_byte_pairs(tokenizer: Tokenizer, size: int) -> BytePairVocabulary:
    """The tokenizer of a model that reads `size` ids.

    Raises:
        ModelError: anything that llama.cpp would cut, merge or normalise otherwise; more tokens than the model reads.
    """
    hf = tokenizer.hf
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"the tokenizer {tokenizer.name!r} is a {type(hf).__name__}, which has no tokenizer.json")
    parts = json.loads(backend.to_str())
    if reason := _other(parts):
        raise ModelError(f"the tokenizer {tokenizer.name!r} {reason}")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in parts["model"]["merges"])
    cut = _cut(parts, merges)
    if cut is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name!r} cuts text before it merges in none of the ways that are written here, and that "
            "llama.cpp has names for: GPT-2's, SmolLM's, Qwen 2's and 3's, Llama 3's"
        )
    added, special = parts["added_tokens"], _special(tokenizer)
    adds = _around(tokenizer, special)
    tokens, kinds = _by_id(parts["model"]["vocab"], added, size, tokenizer.name)
    return BytePairVocabulary(tokens, kinds, merges, cut, adds, special, _template(hf))


def _other(parts: Mapping[str, Any]) -> str:
    """Why a tokenizer is no byte-level BPE as llama.cpp has it; "" = it is one."""
    model, normalizer = parts["model"], parts.get("normalizer")
    if model["type"] != "BPE" or model.get("byte_fallback") or _ends_with(parts.get("decoder")) != "ByteLevel":
        return f"is no byte-level BPE ({model['type']})"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "merges at random, or marks the beginnings or ends of words"
    if normalizer is not None and normalizer["type"] != "NFC":
        return f"rewrites text before it reads it ({normalizer['type']})"
    from tokenizers.pre_tokenizers import ByteLevel

    missing = set(ByteLevel.alphabet()) - _NEVER - set(model["vocab"])
    if missing - (frozenset() if model.get("unk_token") else _RARE):
        return f"has no token for {len(missing)} of the bytes that text is made of"
    greedy = [t["content"] for t in parts["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    return f"has tokens that take the space beside them along ({greedy[0]!r})" if greedy else ""


def _ends_with(part: Mapping[str, Any] | None) -> str:
    """The kind of a part, or of the last of a sequence."""
    if part is None:
        return ""
    inner = part.get("decoders")
    return _ends_with(inner[-1]) if inner else str(part["type"])


def _cut(parts: Mapping[str, Any], merges: Sequence[str]) -> str | None:
    """The name of how text is cut; None = llama.cpp has none."""
    steps = _steps(parts.get("pre_tokenizer"))
    whole = bool(parts["model"].get("ignore_merges"))
    if steps == (EMBEDDED, _BYTES) and not whole and _spared(parts["added_tokens"], merges):
        return _UNCUT
    return _NAMES.get((steps, whole))


def _steps(part: Mapping[str, Any] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return tuple(step for inner in part["pretokenizers"] for step in _steps(inner))
    if part["type"] == "ByteLevel" and not part.get("add_prefix_space"):
        return (_GPT2 if part.get("use_regex", True) else _BYTES,)
    if part["type"] == "Digits" and part.get("individual_digits"):
        return (_DIGITS,)
    if part["type"] == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return (str(part["pattern"].get("Regex", "")),)
    return (f"unknown: {part['type']}",)


def _spared(added: Sequence[Mapping[str, Any]], merges: Sequence[str]) -> bool:
    """Whether no merged token could lie across a cut, so that the same is merged without any."""
    words = {token["content"] for token in added}
    return {"<answer>", "</answer>"} <= words and all(_SPARED.fullmatch(pair.replace(" ", "", 1)) for pair in merges)


def _by_id(
    vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], size: int, name: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(tokens, kinds). What a template writes is found in a text before it is cut, as are added words."""
    known = {number: (text, NORMAL) for text, number in vocabulary.items()}
    known |= {token["id"]: (token["content"], CONTROL if token["special"] else USER_DEFINED) for token in added}
    if max(known) >= size:
        raise ModelError(f"the tokenizer {name!r} has tokens up to {max(known)}, and the model reads {size}")
    rows = [known.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    return tuple(text for text, _ in rows), tuple(kind for _, kind in rows)


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokenizer's own end is the first of the ends; llama.cpp knows further ones by their texts."""
    hf = tokenizer.hf
    own = hf.eos_token_id if hf.eos_token_id in tokenizer.end_ids else min(tokenizer.end_ids)
    ends = [own, *sorted(tokenizer.end_ids - {own})]
    found = {"bos": hf.bos_token_id, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    found |= {"pad": hf.pad_token_id, "unk": hf.unk_token_id}
    return {name: int(number) for name, number in found.items() if number is not None}


def _around(tokenizer: Tokenizer, special: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether a text gets the token that begins, and the one that ends.

    Raises:
        ModelError: others are put around it.
    """
    bare, whole = ([*tokenizer.hf("a", add_special_tokens=some)["input_ids"]] for some in (False, True))
    for before in (False, True):
        for behind in (False, True):
            first = [special[name] for name in ("bos",) if before and name in special]
            last = [special["eos"]] if behind else []
            if whole == [*first, *bare, *last] and (bool(first), bool(last)) == (before, behind):
                return before, behind
    raise ModelError(
        f"the tokenizer {tokenizer.name!r} puts more around a text than a token that begins and one that ends"
    )


def _template(hf: Any) -> Any:
    found = getattr(hf, "chat_template", None)
    return [{"name": k, "template": v} for k, v in found.items()] if isinstance(found, dict) else found


# A model as one GGUF file for people: its weights, its own words and its chat template, for llama.cpp and what is built on it.

_TYPES = {"fp32": "ALL_F32", "bf16": "MOSTLY_BF16"}
"""A precision to its name among `gguf.LlamaFileType`."""


def write_gguf(final: Path, model: Any, words: BytePairVocabulary, *, name: str, dtype: str) -> None:
    """The file, whole or not there. model: transformers' own, in float32. name: what the model is called. dtype: fp32 or bf16.

    Raises:
        EngineError: a parameter that the architecture has no place for, or the package `gguf` is missing; OSError: a full disk.
    """
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        with open_gguf_writer(temporary, model, int(import_gguf().LlamaFileType[_TYPES[dtype]])) as writer:
            writer.add_name(name)
            _write_byte_pair_vocabulary(writer, words)
            add_weights(writer, model, dict(model.named_parameters()), bf16=dtype == "bf16")
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def _write_byte_pair_vocabulary(writer: Any, words: BytePairVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(words.pre_tokenizer)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.kinds))
    writer.add_token_merges(list(words.merges) or ["< 0"])  # a list that is empty is refused
    begins, ends = words.adds_bos_eos
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    for name, token in words.special.items():
        getattr(writer, f"add_{name}_token_id")(token)
    if words.template:
        writer.add_chat_template(words.template)
