"""Models as GGUF files: weights in float32 for a llama.cpp server, and complete files with vocabulary and chat template."""

from __future__ import annotations

import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.errors import EngineError, ModelError, install_command
from policygrad.models.tokenizer import Tokenizer
from policygrad.weight_sync.base import LazyStateDict
from policygrad.weight_sync.folder import WeightWriter, check_exportable, merge_adapters

# Shape and weights of a model.
#
# Names and metadata: ggml-org/ggml, docs/gguf.md, and the package `gguf`. llama.cpp rotates neighbouring pairs (x₀, x₁) in a
# `llama`, transformers the halves (x_i, x_{i + d/2}), so the rows of its q and k are reordered; `qwen2` and `qwen3` rotate halves
# in both.

_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model_type to the architecture's name in `gguf`."""
_ROTATES_PAIRS = ("LLAMA",)


def explain_unsupported_model(model: Any) -> str:
    """Return the reason why a transformers model cannot be written; empty if it can."""
    config = model.config
    if config.model_type not in _ARCHITECTURES:
        return f"llama.cpp is given models of type {', '.join(_ARCHITECTURES)}, and this one is a {config.model_type}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "the model's attention has a sliding window, which is not exported"
    rope_type = _get_rope(config).get("rope_type", "default")
    if rope_type not in ("default", "llama3"):
        return f"the model scales its positions by {rope_type!r}, which is not exported for llama.cpp"
    return ""


def import_gguf() -> Any:
    """Import the package `gguf`. Raises EngineError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise EngineError(f"llama.cpp reads weights as GGUF: {install_command('llama-cpp')}") from error
    return gguf


def load_gguf(file: str, model: Any) -> Any:
    """Read a file as transformers does, into a model that computes in float32.

    Args:
        model: What it was written from, for what transformers does not read from a file: how Llama 3's positions are scaled.
    """
    from transformers import AutoModelForCausalLM

    scaled = _get_rope(model.config).get("rope_type", "default") != "default"
    options = {"config": model.config} if scaled else {}
    # a folder of its own, as transformers reads what else is beside a file; its bar of progress cannot be switched off
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        (Path(folder) / GGUF_FILE).symlink_to(Path(file).resolve())
        read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype="float32", **options)
    return read.eval()


def count_embedding_rows(model: Any) -> int:
    """Return the number of ids that the model reads."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def open_gguf_writer(path: Path, model: Any, file_type: int = 0, *, spooled: bool = False) -> Iterator[Any]:
    """Open a writer with the model's metadata; the file is written when the context ends.

    `file_type` is a `gguf.LlamaFileType` (0 = float32); `spooled` collects tensors in a temporary file, not in memory.
    """
    gguf, config = import_gguf(), model.config
    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]]
    writer = gguf.GGUFWriter(path, architecture, spooled)
    width = _get_head_width(config)
    writer.add_vocab_size(count_embedding_rows(model))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(_get_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(file_type)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weights(writer: Any, model: Any, tensors: Mapping[str, Tensor], *, bf16: bool = False) -> None:
    """Add the parameters under llama.cpp's names. `bf16`: round matrices to bfloat16; vectors stay in float32, as
    llama.cpp expects. Raises EngineError if the architecture has no such parameter."""
    gguf, config = import_gguf(), model.config
    architecture = _ARCHITECTURES[config.model_type]
    rope, width = _get_rope(config), _get_head_width(config)
    if rope.get("rope_type", "default") != "default":
        # the divisor of each frequency [head width / 2]: Llama 3's, as in transformers' modeling_rope_utils
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        original, factors = rope["original_max_position_embeddings"], []
        for i in range(0, width, 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (i / width)
            smooth = (original / wavelength - low) / (high - low)
            if wavelength < original / high:
                factors.append(1.0)
            elif wavelength > original / low:
                factors.append(float(factor))
            else:
                factors.append(1 / ((1 - smooth) / factor + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise EngineError(f"llama.cpp's {architecture.lower()} has no parameter for {name!r}")
        array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
        num_heads = next((n for part, n in heads.items() if f".{part}." in name), 0)
        if num_heads and architecture in _ROTATES_PAIRS:
            halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        array, dtype = np.ascontiguousarray(array), None
        if bf16 and array.ndim > 1:
            dtype = gguf.GGMLQuantizationType.BF16
            array = gguf.quants.quantize(array, dtype)
        writer.add_tensor(gguf_name, array, raw_dtype=dtype)


def _get_head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _get_rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


# A version for a server: weights, and a vocabulary that is just sufficient for token ids.

GGUF_FILE = "model.gguf"
_END_KINDS = ("eos", "eot", "eom")  # end tokens that a vocabulary can name; the client cuts completions at any others


def make_gguf_writer(model: Any, end: frozenset[int]) -> WeightWriter:
    """Return what writes versions for llama.cpp, with `end` as the ids that end a completion. Raises EngineError if the
    architecture is not supported, or the package `gguf` is not installed."""
    check_exportable(model)
    if reason := explain_unsupported_model(model):
        raise EngineError(f"{reason}. Choose --sampler.engine vllm, or local")
    import_gguf()

    # Every token is named by its number: a server omits a token from its reply if its text is not complete UTF-8.
    size, special = count_embedding_rows(model), dict(zip(_END_KINDS, sorted(end), strict=False))
    names, kinds = tuple(f"<{i}>" for i in range(size)), (NORMAL,) * size
    vocabulary = BytePairVocabulary(names, kinds, (), "gpt-2", (False, False), special)

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        with open_gguf_writer(folder / GGUF_FILE, model, spooled=isinstance(tensors, LazyStateDict)) as writer:
            vocabulary.write(writer)
            add_weights(writer, model, merge_adapters(model, tensors))

    return write


# A complete file, for llama.cpp and programs built on it: weights, vocabulary and chat template.

_FILE_TYPES = {"fp32": "ALL_F32", "bf16": "MOSTLY_BF16"}  # precision to its name in `gguf.LlamaFileType`


def write_gguf(
    final: Path,
    model: Any,
    vocabulary: BytePairVocabulary,
    *,
    name: str,
    dtype: str,
    check: Callable[[Path], None] = lambda file: None,
) -> None:
    """Write a complete file, atomically. Raises EngineError if the architecture has no such parameter, or the package
    `gguf` is not installed; OSError if the file cannot be written; and what `check` raises, which is given the file before it has
    its name.

    The model is in float32; `dtype` is fp32 or bf16.
    """
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        with open_gguf_writer(temporary, model, int(import_gguf().LlamaFileType[_FILE_TYPES[dtype]])) as writer:
            writer.add_name(name)
            vocabulary.write(writer)
            add_weights(writer, model, dict(model.named_parameters()), bf16=dtype == "bf16")
        check(temporary)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


# A byte-level BPE tokenizer in llama.cpp's terms: tokens with their kinds, merges, and the name of the pre-tokenizer.
#
# Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`llm_tokenizer_bpe`: the expressions; `load`: what else a name stands for) and
# conversion/base.py (`get_vocab_base`: the kinds of tokens). A file names its pre-tokenizer and cannot contain an expression, so a
# pre-tokenizer that llama.cpp has no name for cannot be written.

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens: text in the letters that stand for bytes; control tokens of a template; words that are never split; unused
ids."""
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
QWEN, LLAMA = rf"{_WORDS}\p{{N}}{_END}", rf"{_WORDS}\p{{N}}{{1,3}}{_END}"
EMBEDDED = r"\d|\n|(?<=\p{L})-|</?answer>"
"""The embedded model's. llama.cpp has no name for it, and needs none where `_has_no_split_merge` holds."""
_BYTES, _GPT2, _DIGITS = "bytes", "bytes by GPT-2's expression", "digits"
# (steps of the pre-tokenizer, True if a word that is a token is never merged) to llama.cpp's name for both.
_PRE_TOKENIZERS: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((QWEN, _BYTES), False): "qwen2",
    ((LLAMA, _BYTES), True): "llama-bpe",
    ((LLAMA, _BYTES), False): "dbrx",
}
_INVALID_BYTES = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
"""Letters of bytes that never occur in UTF-8 (RFC 3629), which a tokenizer need not have."""
_RARE_BYTES = frozenset(chr(byte + 256) for byte in range(32) if chr(byte) not in "\t\n\v\f\r") | frozenset(
    map(chr, (0xF1, 0xF2, 0xF3, 0xF4))
)
"""Letters of control characters, and of bytes that start characters above U+3FFFF, which a vocabulary may lack (SmolLM2's lacks
eight): tokenizer and llama.cpp both omit such a byte. They may differ in the merges next to it, within a run of punctuation."""
_DIGITS_ONLY = "superbpe"  # llama.cpp's pre-tokenizer that splits at digits only
_UNSPLIT_TOKEN = re.compile(r"(?:Ġ-?|[!-,./:-~])+")
"""Tokens that `EMBEDDED` never splits: no digit, no line end, and a hyphen only after a space."""


@dataclass(frozen=True)
class BytePairVocabulary:
    """A tokenizer in llama.cpp's terms."""

    tokens: tuple[str, ...]  # by id, as many as the model reads
    kinds: tuple[int, ...]
    merges: tuple[str, ...]  # `LEFT RIGHT`, in order of priority
    pre_tokenizer: str  # its name in llama.cpp
    adds_bos_eos: tuple[bool, bool]  # True if a text gets the first token, and the last one
    special: Mapping[str, int]  # ids of bos, eos, eot, eom, pad and unk, as far as they exist
    template: Any = None  # the chat template; or several, each a dict with name and template

    def write(self, writer: Any) -> None:
        """Add the vocabulary to a GGUF writer."""
        writer.add_tokenizer_model("gpt2")  # byte-level BPE
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.kinds))
        writer.add_token_merges(list(self.merges) or ["< 0"])  # an empty list is refused
        writer.add_add_bos_token(self.adds_bos_eos[0])
        writer.add_add_eos_token(self.adds_bos_eos[1])
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        if self.template:
            writer.add_chat_template(self.template)


def extract_byte_pairs(tokenizer: Tokenizer, size: int) -> BytePairVocabulary:
    """Return the tokenizer of a model that reads `size` ids. Raises ModelError if llama.cpp would split, merge or
    normalise text differently, or there are more tokens than ids."""
    hf = tokenizer.hf
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"the tokenizer {tokenizer.name!r} is a {type(hf).__name__}, which has no tokenizer.json")
    parts = json.loads(backend.to_str())
    if reason := _explain_unsupported_tokenizer(parts):
        raise ModelError(f"the tokenizer {tokenizer.name!r} {reason}")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in parts["model"]["merges"])
    steps, ignores_merges = _list_steps(parts.get("pre_tokenizer")), bool(parts["model"].get("ignore_merges"))
    pre_tokenizer = _PRE_TOKENIZERS.get((steps, ignores_merges))
    if steps == (EMBEDDED, _BYTES) and not ignores_merges and _has_no_split_merge(parts["added_tokens"], merges):
        pre_tokenizer = _DIGITS_ONLY
    if pre_tokenizer is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name!r} splits text before merging in a way that llama.cpp has no name for, or that is not "
            "supported here. Supported are GPT-2's, SmolLM's, Qwen 2's and 3's, Llama 3's."
        )

    texts = {number: (text, NORMAL) for text, number in parts["model"]["vocab"].items()}
    for token in parts["added_tokens"]:  # matched before the text is split
        texts[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if max(texts) >= size:
        raise ModelError(f"the tokenizer {tokenizer.name!r} has tokens up to {max(texts)}, and the model reads {size}")
    rows = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]

    # the tokenizer's own end token is the first of the ends; llama.cpp knows further ones by their text
    eos = hf.eos_token_id if hf.eos_token_id in tokenizer.end_ids else min(tokenizer.end_ids)
    ids = {"bos": hf.bos_token_id, **dict(zip(_END_KINDS, [eos, *sorted(tokenizer.end_ids - {eos})], strict=False))}
    ids |= {"pad": hf.pad_token_id, "unk": hf.unk_token_id}
    special = {name: int(number) for name, number in ids.items() if number is not None}

    # which of bos and eos the tokenizer adds to a text
    bare, full = ([*hf("a", add_special_tokens=add)["input_ids"]] for add in (False, True))
    for adds_bos, adds_eos in product((False, True), repeat=2):
        first = [special[name] for name in ("bos",) if adds_bos and name in special]
        last = [special["eos"]] if adds_eos else []
        if full == [*first, *bare, *last] and bool(first) == adds_bos:
            break
    else:
        raise ModelError(f"the tokenizer {tokenizer.name!r} adds more than one token at the start and one at the end")

    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    tokens, kinds = zip(*rows, strict=True)
    return BytePairVocabulary(tokens, kinds, merges, pre_tokenizer, (adds_bos, adds_eos), special, template)


def _explain_unsupported_tokenizer(parts: Mapping[str, Any]) -> str:
    """Return the reason why a tokenizer is not byte-level BPE as in llama.cpp; empty if it is."""
    model, normalizer, decoder = parts["model"], parts.get("normalizer"), parts.get("decoder") or {"type": ""}
    while decoder.get("decoders"):
        decoder = decoder["decoders"][-1]
    if model["type"] != "BPE" or model.get("byte_fallback") or decoder["type"] != "ByteLevel":
        return f"is no byte-level BPE ({model['type']})"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "merges at random, or marks the start or end of words"
    if normalizer is not None and normalizer["type"] != "NFC":
        return f"rewrites text before reading it ({normalizer['type']})"
    from tokenizers.pre_tokenizers import ByteLevel

    missing = set(ByteLevel.alphabet()) - _INVALID_BYTES - set(model["vocab"])
    if missing - (frozenset() if model.get("unk_token") else _RARE_BYTES):
        return f"has no token for {len(missing)} of the bytes that text consists of"
    stripping = [t["content"] for t in parts["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    return f"has tokens that consume the space next to them ({stripping[0]!r})" if stripping else ""


def _list_steps(part: Mapping[str, Any] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return tuple(step for inner in part["pretokenizers"] for step in _list_steps(inner))
    if part["type"] == "ByteLevel" and not part.get("add_prefix_space"):
        return (_GPT2 if part.get("use_regex", True) else _BYTES,)
    if part["type"] == "Digits" and part.get("individual_digits"):
        return (_DIGITS,)
    if part["type"] == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return (str(part["pattern"].get("Regex", "")),)
    return (f"unknown: {part['type']}",)


def _has_no_split_merge(added: Sequence[Mapping[str, Any]], merges: Sequence[str]) -> bool:
    """Return True if no merged token could lie across a split of `EMBEDDED`, so that merging without splits gives the same."""
    contents = {token["content"] for token in added}
    return {"<answer>", "</answer>"} <= contents and all(
        _UNSPLIT_TOKEN.fullmatch(pair.replace(" ", "", 1)) for pair in merges
    )
