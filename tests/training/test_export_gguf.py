"""A model as one GGUF file: the real llama.cpp reads text in the ids of its tokenizer, and goes on as transformers does."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import unicodedata
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policygrad as pg
from doubles.byte_level import END, TEMPLATE, TEXTS, changed, cuts, tokenizer
from doubles.models import changed_copy
from policygrad.errors import ModelError, RunError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.engines import llama_server
from policygrad.tasks import load_task
from policygrad.training.export import export_gguf
from policygrad.weight_sync.gguf import CONTROL, UNUSED, USER_DEFINED, extract_byte_pairs

gguf = pytest.importorskip("gguf")
Command = Callable[..., tuple[int, str, str]]
CHARACTERS = "12-3-4 - 5 a-b --c d--e\n\n-f </answer> <answer> xanswer>y 0.5é-🙂"
"""What the embedded tokenizer cuts at."""


@contextmanager
def served(file: Path) -> Iterator[Callable[..., Any]]:
    """Asks llama.cpp's own server, which has loaded the file: asked("/tokenize", content=…)."""
    pytest.importorskip("xllamacpp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"--file={file}",
        "--name=own",
        f"--port={port}",
        "--max-concurrency=1",
        "--context-length=512",
        "--threads=1",
    )
    argv = [sys.executable, "-P", llama_server.__file__, "serve", *options, f"--parent={os.getpid()}"]
    plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def asked(path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with plain.open(request, timeout=60) as answer:
            return json.loads(answer.read())

    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any(" serves " in line for line in server.stdout)
            yield asked
        finally:
            server.kill()


def saved(own: Tokenizer, folder: Path, kind: str = "llama") -> Path:
    """A random model that reads a few ids more than the tokenizer has, as a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    end = own.hf.eos_token_id
    config = AutoConfig.for_model(
        kind, **sizes, num_key_value_heads=2, vocab_size=len(own.hf) + 5, max_position_embeddings=256, eos_token_id=end
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    own.hf.save_pretrained(folder)
    return folder


CUTS = [
    pytest.param(
        cut, begins, marks=[] if (cut, begins) in {("gpt-2", False), ("llama-bpe", True)} else pytest.mark.full
    )
    for cut in ("gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx")
    for begins in (False, True)
]


@pytest.mark.parametrize(("cut", "begins"), CUTS)
def test_llama_cpp_tokenises_like_the_tokenizer(cut: str, begins: bool, tmp_path: Path) -> None:
    own = tokenizer(cut, begins)
    kind = "qwen2" if cut == "qwen2" else "llama"
    file = export_gguf(str(saved(own, tmp_path / "model", kind)))
    assert file == tmp_path / "model" / "model.gguf"
    hf = load_tokenizer(str(tmp_path / "model"), load_model(str(tmp_path / "model"))).hf
    with served(file) as asked:
        for hard in TEXTS:
            text = (
                unicodedata.normalize("NFC", hard) if cut == "qwen2" else hard
            )  # which Qwen's does, and llama.cpp not
            expected = hf(text, add_special_tokens=False)["input_ids"]
            assert asked("/tokenize", content=text)["tokens"] == expected, text
            full = asked("/tokenize", content=text, add_special=True)["tokens"]
            assert full == hf(text)["input_ids"], text
            assert asked("/detokenize", tokens=expected)["content"] == text
        assert asked("/props")["chat_template"].strip() == TEMPLATE.strip()


def test_the_texts_distinguish_all_pre_tokenizers() -> None:
    """Otherwise the test above would hold with another name in the file."""
    own = {name: tokenizer(name) for name in cuts()}
    written = {name: json.loads(one.hf.backend_tokenizer.to_str()) for name, one in own.items()}
    for one, other in itertools.permutations(own, 2):
        model = {"ignore_merges": written[other]["model"]["ignore_merges"]}
        swapped = changed(own[one], pre_tokenizer=written[other]["pre_tokenizer"], model=model)
        assert any(swapped.hf(text)["input_ids"] != own[one].hf(text)["input_ids"] for text in TEXTS), (one, other)


def test_the_embedded_model_generates_as_in_transformers(tmp_path: Path, run_command: Command) -> None:
    file = tmp_path / "there" / "tiny.gguf"
    code, out, err = run_command("export", "tiny", "--format", "gguf", "--output", str(file))
    assert (code, out.strip()) == (0, str(file)), err
    model = load_model("tiny")
    own = load_tokenizer("tiny", model)
    prompts = [str(example.prompt) for example in load_task("embedded").eval_examples(6)]
    with served(file) as asked:
        for text in (*TEXTS, *prompts, CHARACTERS):
            assert asked("/tokenize", content=text)["tokens"] == own.hf(text)["input_ids"], text
        for prompt in prompts:
            ids = torch.tensor([own.hf(prompt)["input_ids"]])
            here = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()  # type: ignore[operator]
            there = asked("/completion", prompt=prompt, n_predict=24, temperature=0, return_tokens=True)
            assert [t for t in there["tokens"] if t not in own.end_ids] == [t for t in here if t not in own.end_ids], (
                prompt
            )
            assert there["content"] == own.decode(here)


def test_the_file_has_weights_vocabulary_and_template(tmp_path: Path) -> None:
    own = tokenizer("smollm")
    model = saved(own, tmp_path / "mine" / "model")
    file = export_gguf(str(model), str(tmp_path / "half.gguf"), dtype="bf16")
    result = gguf.GGUFReader(file)
    assert result.fields["general.name"].contents() == "mine"
    assert result.fields["general.file_type"].contents() == int(gguf.LlamaFileType.MOSTLY_BF16)
    assert result.fields["tokenizer.ggml.eos_token_id"].contents() == own.hf.eos_token_id
    assert result.fields["tokenizer.ggml.bos_token_id"].contents() == own.hf.bos_token_id
    assert result.fields["tokenizer.ggml.tokens"].contents()[: len(own.hf)] == own.hf.convert_ids_to_tokens(
        list(range(len(own.hf)))
    )
    kinds = result.fields["tokenizer.ggml.token_type"].contents()
    assert kinds[own.hf.convert_tokens_to_ids(END)] == CONTROL
    assert kinds[own.hf.convert_tokens_to_ids("<tool_call>")] == USER_DEFINED
    assert kinds[-5:] == [UNUSED] * 5
    full = load_model(str(model)).get_parameter("model.layers.0.mlp.down_proj.weight").detach()
    tensors = {tensor.name: tensor for tensor in result.tensors}
    matrix, vector = tensors["blk.0.ffn_down.weight"], tensors["blk.0.ffn_norm.weight"]
    assert (matrix.tensor_type.name, vector.tensor_type.name) == ("BF16", "F32")
    rounded = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    assert np.array_equal(rounded, full.bfloat16().float().numpy())
    assert oct(file.stat().st_mode & 0o777) == oct((model / "config.json").stat().st_mode & 0o777)
    with pytest.raises(RunError, match=r"half\.gguf exists: choose another --output"):
        export_gguf(str(model), str(file))


def test_adapters_are_merged_in_the_file(small: pg.Run, tmp_path: Path, run_command: Command) -> None:
    pytest.importorskip("peft")
    run = replace(small, steps=1, lr=1e-2, learner=pg.LearnerConfig(lora="rank=4"), output=str(tmp_path / "run"))
    folder = pg.train(run, display=False).output
    assert folder is not None
    code, out, err = run_command("export", str(folder), "--format", "gguf")
    assert (code, out.strip()) == (0, str(folder / "model.gguf")), err
    assert run_command("export", str(folder), "--merge")[0] == 0
    name = "model.layers.1.mlp.up_proj.weight"
    merged = load_model(str(folder / "merged")).get_parameter(name).detach()
    before = load_model(str(run.model)).get_parameter(name).detach()
    result = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}["blk.1.ffn_up.weight"]
    assert np.array_equal(result.data, merged.numpy())
    assert not torch.equal(merged, before)


LOWER = {"type": "Lowercase"}
TAKES = {"id": 0, "content": END, "single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
CLOSED = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [2], "tokens": ["<|im_start|>"]}},
}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": LOWER}, r"rewrites text before reading it \(Lowercase\)"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "in a way that llama.cpp has no name for"),
        ({"pre_tokenizer": None}, "in a way that llama.cpp has no name for"),
        ({"model": {"ignore_merges": True}}, "in a way that llama.cpp has no name for"),
        ({"model": {"dropout": 0.1}}, "merges at random"),
        ({"decoder": None}, "is no byte-level BPE"),
        ({"added_tokens": [TAKES | {"special": True}]}, r"consume the space next to them \('<\|im_end\|>'\)"),
        ({"post_processor": CLOSED}, "adds more than one token"),
    ],
)
def test_an_unsupported_tokenizer_is_refused(parts: dict[str, Any], says: str) -> None:
    own = tokenizer("gpt-2")
    assert extract_byte_pairs(own, len(own.hf)).pre_tokenizer == "gpt-2"
    with pytest.raises(ModelError, match=says):
        extract_byte_pairs(changed(own, **parts), len(own.hf))


SMOLLM2 = "\u0104\u0106\u0113\u0114\u0116\u011dñò"
"""Letters of the bytes that SmolLM2's vocabulary lacks: 04, 06, 13, 14, 16, 1d, f1 and f2."""


def lacking(own: Tokenizer, letters: str, **model: Any) -> Tokenizer:
    """The tokenizer without the tokens of some bytes, whose ids stand for nothing, and without the merges that need them."""
    parts = json.loads(own.hf.backend_tokenizer.to_str())["model"]
    vocabulary = {f"no byte {n}" if token in letters else token: n for token, n in parts["vocab"].items()}
    merges = [pair for pair in parts["merges"] if not set("".join(pair)) & set(letters)]
    return changed(own, model={"vocab": vocabulary, "merges": merges} | model)


def test_rare_bytes_need_no_token() -> None:
    own = tokenizer("gpt-2")
    assert extract_byte_pairs(lacking(own, "Àÿ"), len(own.hf)).pre_tokenizer == "gpt-2"
    assert extract_byte_pairs(lacking(own, SMOLLM2), len(own.hf)).pre_tokenizer == "gpt-2"
    with pytest.raises(ModelError, match="has no token for 2 of the bytes that text consists of"):
        extract_byte_pairs(lacking(own, "bÃ"), len(own.hf))
    with pytest.raises(ModelError, match="has no token for 8 of the bytes"):  # llama.cpp writes no such token
        extract_byte_pairs(lacking(own, SMOLLM2, unk_token=END), len(own.hf))


def test_a_vocabulary_without_eight_bytes_is_exported_and_reads_text_alike(tmp_path: Path) -> None:
    own = lacking(tokenizer("smollm"), SMOLLM2)
    file = export_gguf(str(saved(own, tmp_path / "model")))
    hf = load_tokenizer(str(tmp_path / "model"), load_model(str(tmp_path / "model"))).hf
    with served(file) as asked:
        for text in (*TEXTS, "hel\x04lo", "a\x06 b\x13", " wor\x14ld 1\x162", "x\U00050000y\U000a0000", "\x1d"):
            assert asked("/tokenize", content=text)["tokens"] == hf(text, add_special_tokens=False)["input_ids"], text


def test_tokens_across_pre_tokenizer_splits_are_refused() -> None:
    """llama.cpp has no name for its cuts, which matter to no merge that it has."""
    own = load_tokenizer("tiny", load_model("tiny"))
    parts = json.loads(own.hf.backend_tokenizer.to_str())["model"]
    assert extract_byte_pairs(own, 487).pre_tokenizer == "superbpe"
    for left, right in (("1", "2"), ("a", "-"), ("-", "-")):
        model = {"merges": [*parts["merges"], [left, right]], "vocab": parts["vocab"] | {left + right: 487}}
        with pytest.raises(ModelError, match=r"in a way that llama\.cpp has no name for"):
            extract_byte_pairs(changed(own, model=model), 488)
    with pytest.raises(ModelError, match="has tokens up to 486, and the model reads 400"):
        extract_byte_pairs(own, 400)


def test_an_unsupported_model_is_refused(random_model: Path, tmp_path: Path, run_command: Command) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 487}
    other = tmp_path / "other"
    load_tokenizer("tiny", load_model("tiny")).hf.save_pretrained(other)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **small, eos_token_id=1)).save_pretrained(other)
    scores = changed_copy(
        random_model, tmp_path / "scores", config={"architectures": ["LlamaForSequenceClassification"]}
    )
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.toml").write_text("seed = 0\n")
    for argv, message in (
        ((other,), "this one is a gpt2: use llama.cpp's own convert_hf_to_gguf.py"),
        ((scores,), "scores texts and writes none"),
        (("tiny",), "add --output FILE.gguf"),
        (("tiny", "--output", "tiny.bin"), "--output NAME.gguf, not tiny.bin"),
        (("tiny", "--merge"), "omit --merge and --push"),
        ((tmp_path / "begun",), "has no model yet: finish it"),
    ):
        code, _, err = run_command("export", *map(str, argv), "--format", "gguf")
        assert (code, " ".join(message.split()) in " ".join(err.split())) == (2, True), err
    code, _, err = run_command("export", "tiny", "--format", "onnx")
    assert (code, "--format must be gguf" in err) == (2, True), err
