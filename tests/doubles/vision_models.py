"""Random models that see, of seven families, each with a real processor of its own: a few ten thousand parameters, no files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from policygrad.models.loading import disable_dropout
from policygrad.utils.pictures import Picture

VOCABULARY = 128
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}MARK{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- if message['role'] == 'assistant' -%}<eos>{%- else -%}{{ '\\n' }}{%- endif -%}{%- endfor -%}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def make_family(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return a random model of a family, in float32, and its processor."""
    torch.manual_seed(seed)
    model, processor = FAMILIES[name]()
    return disable_dropout(model).eval(), processor


def make_picture(width: int, height: int, seed: int) -> Picture:
    """Return a picture of noise."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.numpy()).save(file, "PNG")
    return Picture(data=file.getvalue())


def make_tokenizer(special: list[str], **named: str) -> Any:
    """Return a tokenizer of letters, with these control tokens; `named` are known to it by name, as `boi_token` is."""
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<pad>", "<eos>", *special]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=named
    )


def _without_videos(kind: Any, **parts: Any) -> Any:
    """Make a processor without the video processor, which needs torchvision."""

    class Processor(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name not in ("video_processor", "feature_extractor"):
                super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = kind.__name__
    return Processor(video_processor=None, **parts)


def _idefics3() -> tuple[nn.Module, Any]:
    rows = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    tokenizer = make_tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *rows])
    config = transformers.Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_config={**TOWER, **LAYERS, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **TEXT},
        scale_factor=2,
        pad_token_id=0,
    )
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=TEMPLATE.replace("MARK", "<image>")
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _qwen(
    config_class: Any, model_class: Any, processor_class: Any, text: dict[str, Any], vision: dict[str, Any]
) -> Any:
    tokenizer = make_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    to_id = tokenizer.convert_tokens_to_ids
    config = config_class(
        text_config=text,
        vision_config={
            **TOWER,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "out_hidden_size": 32,
            **vision,
        },
        image_token_id=to_id("<|image_pad|>"),
        video_token_id=to_id("<|video_pad|>"),
        vision_start_token_id=to_id("<|vision_start|>"),
        vision_end_token_id=to_id("<|vision_end|>"),
    )
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    processor = _without_videos(
        processor_class,
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return model_class(config), processor


def _qwen2_5_vl() -> tuple[nn.Module, Any]:
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    return _qwen(  # type: ignore[no-any-return]
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLProcessor,
        {**text, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
    )


def _qwen3_vl() -> tuple[nn.Module, Any]:
    return _qwen(  # type: ignore[no-any-return]
        transformers.Qwen3VLConfig,
        transformers.Qwen3VLForConditionalGeneration,
        transformers.Qwen3VLProcessor,
        {**TEXT, "rope_scaling": {**MROPE, "mrope_interleaved": True}},
        {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    )


def _qwen3_5() -> tuple[nn.Module, Any]:
    linear = {f"linear_{name}": value for name, value in LINEAR_ATTENTION.items()}
    text = {
        **TEXT,
        **linear,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
    }
    return _qwen(  # type: ignore[no-any-return]
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        transformers.Qwen3VLProcessor,
        text,
        {"depth": 3, "num_position_embeddings": 64},
    )


LINEAR_ATTENTION = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}


def _gemma3() -> tuple[nn.Module, Any]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = make_tokenizer(list(named.values()), **named)
    to_id = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**TOWER, **LAYERS, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        boi_token_index=to_id("<start_of_image>"),
        eoi_token_index=to_id("<end_of_image>"),
        image_token_index=to_id("<image_soft_token>"),
    )
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("MARK", "<start_of_image>"),
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # transformers begins with 0, by which no picture could be told from another
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.2)
    return model, processor


def _gemma4() -> tuple[nn.Module, Any]:
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }
    tokenizer = make_tokenizer(list(named.values()), **named)
    to_id = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            "global_head_dim": 8,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            **TOWER,
            **LAYERS,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        audio_config=None,
        boi_token_id=to_id("<|image>"),
        eoi_token_id=to_id("<image|>"),
        image_token_id=to_id("<|image|>"),
        video_token_id=to_id("<|video|>"),
        audio_token_id=to_id("<|audio|>"),
    )
    processor = _without_videos(
        transformers.Gemma4Processor,
        feature_extractor=None,
        image_processor=transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("MARK", "<|image|>"),
    )
    return transformers.Gemma4ForConditionalGeneration(config), processor


def _internvl() -> tuple[nn.Module, Any]:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = make_tokenizer(list(named.values()), **named)
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={**TOWER, **LAYERS, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
    )
    processor = _without_videos(
        transformers.InternVLProcessor,
        image_processor=transformers.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=False),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("MARK", "<IMG_CONTEXT>"),
    )
    return transformers.InternVLForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "idefics3": _idefics3,  # SmolVLM's architecture
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "internvl": _internvl,
}


def save_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model and its processor as a folder of the hub has them, and return the folder."""
    model, processor = make_family(name, seed)
    model.save_pretrained(folder)  # type: ignore[operator]
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    sizes = {
        name: getattr(processor, name) for name in ("image_seq_len", "image_seq_length") if hasattr(processor, name)
    }
    named = {"processor_class": type(processor).__name__, "chat_template": processor.chat_template, **sizes}
    (folder / "processor_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder
