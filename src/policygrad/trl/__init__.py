"""TRL's online trainers by their own names: `from policygrad.trl import GRPOConfig, GRPOTrainer`.

A script for TRL runs unchanged but for that import, or without it: `python -m policygrad.trl script.py`. TRL need not be installed.
"""

from policygrad.utils.lazy_exports import export_lazily

_HOME = {
    "policygrad.trl.config": "GRPOConfig RLOOConfig",
    "policygrad.trl.trainer": "GRPOTrainer RLOOTrainer",
    "policygrad.trl.scripts": (
        "ModelConfig ScriptArguments TrlParser get_kbit_device_map get_peft_config get_quantization_config"
    ),
}

__getattr__, __dir__, __all__ = export_lazily(__name__, _HOME)
