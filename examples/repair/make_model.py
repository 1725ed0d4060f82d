"""Make the model that is to become an agent: a tokenizer of whole words, and a small Llama whose weights are random.

    python make_model.py [FOLDER]

It is saved as FOLDER/blank (`repair-tasks/blank`). What it knows it learns by `policygrad sft` from FOLDER/demonstrations.jsonl.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
# What others say ends with a new line, a reply with the end token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message['content'] + (eos_token if message['role'] == 'assistant' else '\\n') }}"
    "{%- endfor -%}"
)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for which a word, with the space before it, is one token, and so are a sign, a digit, and the fixed parts
    of the agent's commands. Any other text is spelled in bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"sed -i '|c\\ {4}|\./[a-z]+|\.py| {2,}| ?[A-Za-z]+| ?[^ ]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, width: int = 128, layers: int = 4) -> LlamaForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def main(folder: Path) -> None:
    """Save the model."""
    rows = [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer([message["content"] for row in rows for message in row["messages"]])
    model = make_model(tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "blank")
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "repair-tasks"))
