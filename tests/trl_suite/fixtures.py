"""Make every model, processor and data set that TRL's tests of GRPO and RLOO load by a name of the hub.

    python tests/trl_suite/fixtures.py FOLDER --trl CHECKOUT [--remake]

They become FOLDER/trl-internal-testing/NAME: from FOLDER as the working directory, transformers and `datasets` find them where
they would ask the hub. Architectures and sizes are those of TRL's own, weights are random and seeded. Token ids that the tests
write out are Qwen's, so the vocabulary is Qwen's: `qwen.tiktoken` of the package dashscope, converted here. Chat templates are
read from the checkout, by which TRL recognises a family. Made in under two minutes, and again only after a change of this file.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import io
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
import transformers
from datasets import Dataset, Features, Image, List, Value
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

ORGANISATION = "trl-internal-testing"
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", type=Path, required=True, help="a checkout of TRL, or its installed package's folder")
    parser.add_argument("--only", nargs="*", help="beginnings of names, such as tiny-Gemma3")
    parser.add_argument("--remake", action="store_true", help="also what is there already")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    make_fixtures(options.folder, find_templates(options.trl), options.only or [""], options.remake)


def make_fixtures(folder: Path, templates: Path, only: Iterable[str] = ("",), remake: bool = False) -> None:
    """Write what is missing, or everything if this file, the templates or transformers have changed since."""
    target = folder / ORGANISATION
    target.mkdir(parents=True, exist_ok=True)
    stamp, state = folder / ".made_by", describe_makers(templates)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != state:
        shutil.rmtree(target)
        target.mkdir()
        stamp.write_text(state, encoding="utf-8")
    for name, make in list_fixtures(templates).items():
        if not name.startswith(tuple(only)) or ((target / name).exists() and not remake):
            continue
        print(f"{ORGANISATION}/{name}", flush=True)
        unfinished = target / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(target / name, ignore_errors=True)
        make(unfinished)
        unfinished.rename(target / name)


def list_fixtures(templates: Path) -> dict[str, Callable[[Path], None]]:
    """Return who writes which name."""
    made: dict[str, Callable[[Path], None]] = {
        "zen": write_texts,
        "zen-image": write_pictures,
        "zen-multi-image": write_many_pictures,
    }
    for name, row in TEXT_MODELS.items():
        made[f"tiny-{name}"] = partial(write_text_model, name=name, row=row, templates=templates)
    for name, describe in VISION_MODELS.items():
        made[f"tiny-{name}"] = partial(write_vision_model, name=name, describe=describe, templates=templates)
    return made


def find_templates(trl: Path) -> Path:
    """Return the folder of TRL's chat templates."""
    for folder in (trl / "trl/chat_templates", trl / "chat_templates"):
        if folder.is_dir():
            return folder
    sys.exit(f"--trl {trl} has no trl/chat_templates: give a checkout of github.com/huggingface/trl")


def read_template(templates: Path, name: str) -> str:
    return (templates / f"{name}.jinja").read_text(encoding="utf-8")


def describe_makers(templates: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(templates.glob("*.jinja")):
        digest.update(file.name.encode() + file.read_bytes())
    return f"{digest.hexdigest()} transformers {transformers.__version__}\n"


# Data sets: the Zen of Python, whose first twelve openings a test has in their order.

ZEN = [
    ("Beautiful is better than", "ugly."),
    ("Explicit is", "better than implicit."),
    ("Simple is better", "than complex."),
    ("Complex", "is better than complicated."),
    ("Flat is better than", "nested."),
    ("Sparse is better", "than dense."),
    ("Readability", "counts."),
    ("Special cases aren't special", "enough to break the rules."),
    ("Although practicality beats", "purity."),
    ("Errors should never", "pass silently."),
    ("Unless explicitly", "silenced."),
    ("In the face of ambiguity, refuse", "the temptation to guess."),
    ("There should be one-- and preferably", "only one --obvious way to do it."),
    ("Although that way may not be obvious at first", "unless you're Dutch."),
    ("Now is better", "than never."),
    ("Although never is often", "better than *right* now."),
    ("If the implementation is hard to explain,", "it's a bad idea."),
    ("If the implementation is easy to explain,", "it may be a good idea."),
    ("Namespaces are one honking", "great idea -- let's do more of those!"),
]
TRAINING_ROWS = 17
OPENINGS = [opening for opening, _ in ZEN]
QUESTIONS = [f"How does this line of the Zen of Python end: {opening} …?" for opening in OPENINGS]
MESSAGES = List({"role": Value("string"), "content": Value("string")})
PARTS = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})


def write_texts(folder: Path) -> None:
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    write_data_set(
        folder,
        {
            "standard_prompt_only": Dataset.from_dict({"prompt": OPENINGS}),
            "conversational_prompt_only": Dataset.from_dict({"prompt": talks}, features=Features(prompt=MESSAGES)),
        },
    )


def write_pictures(folder: Path) -> None:
    """Write one picture of noise beside each question."""
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    random = np.random.default_rng(SEED)
    rows = {"prompt": talks, "image": [draw_noise(random) for _ in talks]}
    features = Features(prompt=MESSAGES, image=Image())
    write_data_set(folder, {"conversational_prompt_only": Dataset.from_dict(rows, features=features)})


def write_many_pictures(folder: Path) -> None:
    """Write up to three pictures, before, behind and within the question."""
    random = np.random.default_rng(SEED)
    talks, pictures = [], []
    for i, question in enumerate(QUESTIONS):
        count, place = (i + 1) % 4, i % 3
        text, picture = {"type": "text", "text": question}, {"type": "image", "text": None}
        before = {0: count, 1: 0, 2: count // 2}[place]
        content = [picture] * before + [text] + [picture] * (count - before)
        talks.append([{"role": "user", "content": content}])
        pictures.append([draw_noise(random) for _ in range(count)])
    features = Features(prompt=PARTS, images=List(Image()))
    rows = Dataset.from_dict({"prompt": talks, "images": pictures}, features=features)
    write_data_set(folder, {"conversational_prompt_only": rows})


def draw_noise(random: np.random.Generator) -> dict[str, Any]:
    height, width = random.integers(32, 64, size=2)
    file = io.BytesIO()
    PIL.Image.fromarray(random.integers(0, 256, size=(height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_data_set(folder: Path, configs: dict[str, Dataset]) -> None:
    """Write each configuration's splits, and the card that names them for `load_dataset`."""
    lines = ["---", "configs:"]
    for config, rows in configs.items():
        (folder / config).mkdir(parents=True)
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, part in (("train", range(TRAINING_ROWS)), ("test", range(TRAINING_ROWS, len(rows)))):
            rows.select(part).to_parquet(folder / config / f"{split}.parquet")
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


# Vocabularies

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = [
    *["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"],
    *["<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"],
    *["<|image_pad|>", "<|video_pad|>"],
]
QWEN_ADDED = [  # read as one token, and kept where special tokens are left out
    *["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
    *["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
]
# What the tests write out, by the comments beside the ids: a table of another order would make them pass for no reason.
QWEN_TEXTS = {
    '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>': [
        *[151657, 198, 4913, 606, 788, 330, 64648, 22785, 497, 330, 16370, 788, 5212, 64, 788, 220, 18, 11, 330, 65],
        *[788, 220, 19, 11248, 151658, 151645],
    ],
    "I don't know any tool<|im_end|>": [40, 1513, 944, 1414, 894, 5392, 151645],
    "Done!<|im_end|>": [17453, 0, 151645],
}
QWEN3_5_TEXTS = {
    "<tool_call>\n<function=screenshot_tool>\n</function>\n</tool_call><|im_end|>": [
        *[248058, 198, 27, 1628, 13744, 30091, 22076, 29, 198, 510, 1628, 29, 198, 248059, 248046],
    ],
    "I don't know any tool<|im_end|>": [40, 1459, 914, 1366, 866, 5224, 248046],
    "Done!<|im_end|>": [16936, 0, 248046],
}
QWEN3_5_PIECES = {
    1628: "function",
    13744: "=s",
    30091: "creenshot",
    22076: "_tool",
    510: "</",
    16936: "Done",
    1459: " don",
    914: "'t",
    1366: " know",
    866: " any",
    5224: " tool",
}
QWEN3_5_RANKS = 248044


def make_qwen(*, eos: str = "<|im_end|>") -> Any:
    """Qwen 2.5's and 3's tokenizer."""
    tokenizer = make_tokenizer(len(read_ranks()), QWEN_SPECIAL, QWEN_ADDED, eos=eos, pad="<|endoftext|>")
    return check_texts(tokenizer, QWEN_TEXTS)


def make_qwen3_5() -> Any:
    """A tokenizer with the ids of Qwen 3.5 where a test has them: the pieces there change places with those of Qwen 2.5."""
    pieces = [to_letters(piece) for piece in read_ranks()]
    for index, text in QWEN3_5_PIECES.items():
        other = pieces.index(to_letters(text.encode()))
        pieces[index], pieces[other] = pieces[other], pieces[index]
    pieces += [f"<unused_{i}>" for i in range(len(pieces), QWEN3_5_RANKS)]
    core = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list_merges(len(read_ranks())))
    tokenizer = wrap(core, QWEN_SPECIAL, QWEN_ADDED, eos="<|im_end|>", pad="<|endoftext|>")
    return check_texts(tokenizer, QWEN3_5_TEXTS)


def make_tokenizer(ranks: int, special: list[str], added: Iterable[str] = (), **named: Any) -> Any:
    """A tokenizer of Qwen's most frequent pieces, and these tokens behind them."""
    vocabulary = {to_letters(piece): i for i, piece in enumerate(list(read_ranks())[:ranks])}
    return wrap(models.BPE(vocab=vocabulary, merges=list_merges(ranks)), special, added, **named)


def wrap(
    core: models.BPE,
    special: list[str],
    added: Iterable[str],
    *,
    eos: str,
    pad: str,
    bos: str | None = None,
    **more: str,
) -> Any:
    tokenizer = Tokenizer(core)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=pad,
        bos_token=bos,
        extra_special_tokens=more,
        model_max_length=131072,
        clean_up_tokenization_spaces=False,
    )


def check_texts(tokenizer: Any, texts: dict[str, list[int]]) -> Any:
    for text, ids in texts.items():
        if tokenizer.decode(ids) != text:
            sys.exit(
                f"the vocabulary has {tokenizer.decode(ids)!r} where TRL's tests have {text!r}: another dashscope?"
            )
    return tokenizer


@cache
def read_ranks() -> dict[bytes, int]:
    """Return Qwen's pieces in their order, from the package dashscope, which need not be imported."""
    package = importlib.util.find_spec("dashscope")
    if package is None or package.submodule_search_locations is None:
        sys.exit("Qwen's vocabulary is in the package dashscope: pip install --no-deps dashscope")
    file = Path(package.submodule_search_locations[0]) / "resources/qwen.tiktoken"
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in lines}


@cache
def list_merges(count: int) -> list[tuple[str, str]]:
    """Return which two pieces each of the first `count` is made of: what the ranks below its own leave of its bytes."""
    ranks, merges = read_ranks(), []
    for piece, rank in list(ranks.items())[:count]:
        if len(piece) > 1:
            left, right = divide(piece, rank, ranks)
            merges.append((to_letters(left), to_letters(right)))
    return merges


def divide(piece: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


@cache
def byte_letters() -> dict[int, str]:
    """Return the printable letter that byte-level tokenizers write for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(moved)}}


def to_letters(piece: bytes) -> str:
    letters = byte_letters()
    return "".join(letters[byte] for byte in piece)


# Models that read texts

RANKS = 4096
"""Pieces where no test names an id: few, so that a step is quick, and enough that sampling the end is rare."""
LLAMA_SPECIAL = [
    *["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>"],
    *["<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"],
]


def make_llama() -> Any:
    named = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "pad": "<|finetune_right_pad_id|>"}
    return make_tokenizer(RANKS, LLAMA_SPECIAL, **named)


def make_mistral() -> Any:
    return make_tokenizer(RANKS, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], bos="<s>", eos="</s>", pad="</s>")


def make_gemma() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    return make_tokenizer(RANKS, special, bos="<bos>", eos="<eos>", pad="<pad>")


def make_cohere() -> Any:
    special = ["<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"]
    special += ["<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
    return make_tokenizer(RANKS, special, bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>")


def make_glm() -> Any:
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    added = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ]
    return make_tokenizer(RANKS, special, added, eos="<|endoftext|>", pad="<|endoftext|>")


def make_gpt_oss() -> Any:
    special = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"]
    special += ["<|end|>", "<|message|>", "<|call|>"]
    return make_tokenizer(RANKS, special, bos="<|startoftext|>", eos="<|return|>", pad="<|endoftext|>")


def make_nemotron() -> Any:
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    added = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    return make_tokenizer(RANKS, special, added, bos="<s>", eos="<|im_end|>", pad="<|im_end|>")


@dataclass(frozen=True)
class TextModel:
    """A causal model or a reward model; its class is the name as far as the first hyphen."""

    tokenizer: Callable[[], Any]
    template: str = ""  # of TRL's; none for a tokenizer without one
    settings: dict[str, Any] = field(default_factory=dict)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCORE = {"num_labels": 1, "hidden_size": 16}
TEXT_MODELS = {
    "Qwen2ForCausalLM-2.5": TextModel(make_qwen, "qwen2_5"),
    "Qwen3ForCausalLM": TextModel(make_qwen, "qwen3"),
    "Qwen3MoeForCausalLM": TextModel(make_qwen, "qwen3", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "Qwen2ForSequenceClassification-2.5": TextModel(make_qwen, "qwen2_5", SCORE),
    "Qwen3ForSequenceClassification": TextModel(make_qwen, "qwen3", SCORE),
    "LlamaForCausalLM-3.2": TextModel(make_llama, "llama3_2"),
    "LlamaForSequenceClassification-3.2": TextModel(make_llama, "llama3_2", SCORE),
    "RemoteForCausalLM": TextModel(make_llama, "llama3_2"),
    "MistralForCausalLM-0.2": TextModel(make_mistral),
    "Gemma2ForCausalLM": TextModel(make_gemma, "gemma", {"head_dim": 2}),
    "Cohere2ForCausalLM": TextModel(make_cohere, "cohere2", {"logit_scale": 1.0}),
    "Glm4MoeForCausalLM": TextModel(
        make_glm,
        "glm4moe",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "head_dim": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "GptOssForCausalLM": TextModel(make_gpt_oss, "gptoss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "NemotronHForCausalLM-nano": TextModel(
        make_nemotron,
        "nemotron_3_nano",
        {
            **EXPERTS,
            "hidden_size": 16,
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "n_groups": 1,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
}


def write_text_model(folder: Path, name: str, row: TextModel, templates: Path) -> None:
    """Write a random model of two layers in bfloat16, as TRL's are stored, and its tokenizer."""
    tokenizer = row.tokenizer()
    if row.template:
        tokenizer.chat_template = read_template(templates, row.template)
    remote = name.startswith("Remote")
    kind = getattr(transformers, name.split("-")[0].replace("Remote", "Llama"))
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "initializer_range": 0.1,
        **row.settings,
    }
    config = kind.config_class(
        **{key: value for key, value in sizes.items() if value is not None}, **name_ends(tokenizer)
    )
    write_model(folder, kind, config, tokenizer)
    tokenizer.save_pretrained(folder)
    if remote:
        write_remote_code(folder)


def name_ends(tokenizer: Any) -> dict[str, Any]:
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**ids, "pad_token_id": tokenizer.pad_token_id}


def write_model(folder: Path, kind: Any, config: Any, tokenizer: Any) -> None:
    torch.manual_seed(SEED)
    model = kind(config)
    fill_zeros(model)
    model.to(torch.bfloat16)
    if model.can_generate():
        model.generation_config = transformers.GenerationConfig(**name_ends(tokenizer), do_sample=True)
    model.save_pretrained(folder)


def fill_zeros(model: nn.Module) -> None:
    """Make matrices that begin as zeros random: no gradient passes through them to what is below."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))


CONFIGURATION = '''from transformers import LlamaConfig


class RemoteConfig(LlamaConfig):
    """Llama's, under another name."""

    model_type = "remote"
'''
MODELING = '''from transformers import LlamaForCausalLM

from .configuration_remote import RemoteConfig


class RemoteForCausalLM(LlamaForCausalLM):
    """Llama, loaded from a file beside its weights."""

    config_class = RemoteConfig
'''


def write_remote_code(folder: Path) -> None:
    """Turn a Llama's folder into one whose classes are files of it."""
    (folder / "configuration_remote.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_remote.py").write_text(MODELING, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(model_type="remote", architectures=["RemoteForCausalLM"])
    config["auto_map"] = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


# Models that see, whose processors are written as files: a machine without torchvision cannot make one that reads videos too.

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
TEXT = {"hidden_size": 16, "intermediate_size": 32, **LAYERS}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN_TOWER = {"hidden_size": 16, "num_heads": 4, "depth": 2, "patch_size": 14, "spatial_merge_size": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN3_5_TEXT = {
    **TEXT,
    **LINEAR,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    },
}
QWEN3_5_TOWER = {
    **QWEN_TOWER,
    "patch_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 16,
    "num_position_embeddings": 64,
}
SIMPLE_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages -%}<|turn>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<|image|>{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<turn|>\n{%- endfor -%}{%- if add_generation_prompt -%}<|turn>model\n{%- endif -%}"
)
Vision = tuple[Any, Any, dict[str, dict[str, Any]]]
"""A configuration, a tokenizer with its template, and the processor's files."""


def describe_qwen2_vl(templates: Path) -> Vision:
    text = {**TEXT, "num_attention_heads": 2, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    tower = {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2}
    return describe_qwen(templates, "Qwen2VL", make_qwen(), "qwen2_5_vl", text, tower)


def describe_qwen2_5_vl(templates: Path) -> Vision:
    text = {**TEXT, "num_attention_heads": 2, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    tower = {**QWEN_TOWER, "intermediate_size": 32, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
    return describe_qwen(templates, "Qwen2_5_VL", make_qwen(), "qwen2_5_vl", text, tower)


def describe_qwen3_5(templates: Path) -> Vision:
    return describe_qwen(templates, "Qwen3_5", make_qwen3_5(), "qwen3_5_nothink", QWEN3_5_TEXT, QWEN3_5_TOWER)


def describe_qwen3_6(templates: Path) -> Vision:
    text = {**QWEN3_5_TEXT, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
    return describe_qwen(templates, "Qwen3_5Moe", make_qwen3_5(), "qwen3_6", text, QWEN3_5_TOWER)


def describe_qwen(
    templates: Path, family: str, tokenizer: Any, template: str, text: dict[str, Any], tower: dict[str, Any]
) -> Vision:
    tokenizer.chat_template = read_template(templates, template)
    to_id = tokenizer.convert_tokens_to_ids
    config = getattr(transformers, f"{family}Config")(
        text_config={**text, "vocab_size": len(tokenizer), **name_ends(tokenizer)},
        vision_config=tower,
        image_token_id=to_id("<|image_pad|>"),
        video_token_id=to_id("<|video_pad|>"),
        vision_start_token_id=to_id("<|vision_start|>"),
        vision_end_token_id=to_id("<|vision_end|>"),
    )
    area = tower["patch_size"] ** 2
    size = {"shortest_edge": 4 * area, "longest_edge": 64 * area}
    settings = {"patch_size": tower["patch_size"], "merge_size": 2, "temporal_patch_size": 2, "size": size}
    newer = family.startswith("Qwen3_5")
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **settings},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor",
            **settings,
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor" if newer else f"{family}Processor"},
    }
    return config, tokenizer, files


def describe_gemma3(templates: Path) -> Vision:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *named.values()]
    ends = {"bos": "<bos>", "eos": "<end_of_turn>", "pad": "<pad>"}
    tokenizer = make_tokenizer(len(read_ranks()), special, **ends, **named)
    tokenizer.chat_template = read_template(templates, "gemma3")
    to_id = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 4, "vocab_size": len(tokenizer), **name_ends(tokenizer)},
        vision_config={**TOWER, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=to_id("<start_of_image>"),
        eoi_token_index=to_id("<end_of_image>"),
        image_token_index=to_id("<image_soft_token>"),
        **name_ends(tokenizer),
    )
    size = {"height": 56, "width": 56}
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": size,
            "image_seq_length": 4,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    }
    return config, tokenizer, files


def describe_gemma4(templates: Path) -> Vision:
    """Its template is not TRL's, which has none for it in every release."""
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "audio_token": "<|audio|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>"}
    special = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", *named.values()]
    ends = {"bos": "<bos>", "eos": "<turn|>", "pad": "<pad>"}
    tokenizer = make_tokenizer(len(read_ranks()), special, **ends, **named)
    tokenizer.chat_template = SIMPLE_TEMPLATE
    to_id = tokenizer.convert_tokens_to_ids
    text = {
        **TEXT,
        "head_dim": 4,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "use_bidirectional_attention": "vision",
    }
    tower = {**TOWER, "num_key_value_heads": 2, "head_dim": 4, "patch_size": 16, "pooling_kernel_size": 2}
    config = transformers.Gemma4Config(
        text_config={**text, **name_ends(tokenizer)},
        vision_config={**tower, "position_embedding_size": 64},
        audio_config=None,
        boi_token_id=to_id("<|image>"),
        eoi_token_id=to_id("<image|>"),
        image_token_id=to_id("<|image|>"),
        video_token_id=to_id("<|video|>"),
        audio_token_id=to_id("<|audio|>"),
        **name_ends(tokenizer),
    )
    settings = {"patch_size": 16, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma4ImageProcessor",
            "image_seq_length": 70,
            **settings,
        },
        "video_preprocessor_config.json": {"video_processor_type": "Gemma4VideoProcessor", **settings},
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
    }
    return config, tokenizer, files


def describe_llava_next(templates: Path) -> Vision:
    special = ["<unk>", "<s>", "</s>", "<image>"]
    tokenizer = make_tokenizer(len(read_ranks()), special, bos="<s>", eos="</s>", pad="</s>", image_token="<image>")
    tokenizer.chat_template = read_template(templates, "llava_next")
    grid = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", **TEXT, "vocab_size": len(tokenizer), **name_ends(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **TOWER, "image_size": 28, "patch_size": 14},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grid,
        image_seq_length=4,
    )
    images = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": grid}
    files = {
        "preprocessor_config.json": {"image_processor_type": "LlavaNextImageProcessor", **images},
        "processor_config.json": {
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    }
    return config, tokenizer, files


VISION_MODELS: dict[str, Callable[[Path], Vision]] = {
    "Gemma3ForConditionalGeneration": describe_gemma3,
    "Gemma4ForConditionalGeneration": describe_gemma4,
    "LlavaNextForConditionalGeneration": describe_llava_next,
    "Qwen2VLForConditionalGeneration": describe_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": describe_qwen2_5_vl,
    "Qwen3_5ForConditionalGeneration-NoThink": describe_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration-3.6": describe_qwen3_6,
}


def write_vision_model(folder: Path, name: str, describe: Callable[[Path], Vision], templates: Path) -> None:
    """Write a random model that sees, and the files of its processor."""
    config, tokenizer, files = describe(templates)
    write_model(folder, getattr(transformers, name.split("-")[0]), config, tokenizer)
    tokenizer.save_pretrained(folder)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
