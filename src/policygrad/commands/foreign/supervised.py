"""The same names where `policygrad sft` and `reward-model` say something else than `train`."""

from __future__ import annotations

from policygrad.commands.foreign.meanings import Ours

SUPERVISED = {  # where `policygrad sft` and `reward-model` say something else than `train`
    "num_train_epochs": Ours("--epochs"),
    "max_epochs": Ours("--epochs"),
    "per_device_train_batch_size": Ours(
        "--batch-size", "rows per update, over all passes; memory is set by --learner.micro-tokens"
    ),
    "train_batch_size": Ours("--batch-size", "rows per update"),
    "gradient_accumulation_steps": Ours("--learner.micro-tokens", "tokens per pass: what does not fit is accumulated"),
    "dataset_name": Ours("--data", "a file, or hf:REPOSITORY:CONFIG:SPLIT"),
    "dataset": Ours("--data", "a file, or hf:REPOSITORY:CONFIG:SPLIT"),
    "actor_learning_rate": Ours("--lr"),
    "save_steps": Ours("--checkpoint.every", "in updates"),
}
