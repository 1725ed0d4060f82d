"""Language models: loading, precision, adapters, tokenizers, chat templates, and copies of a model."""
