"""Count the layers of the models in planning/models.toml that are not of the Llama family, and write planning/counted_models.json.

    python scripts/count_models.py [NAME ...]

Without names all are counted, which takes some ten minutes on two cores and 8 GB. transformers' version is written beside them.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import transformers

from policygrad.planning.model_shapes import COUNTED_FILE, MODEL_TYPES, MODELS_FILE
from policygrad.training.shape_counting import count_shape


def main(names: list[str]) -> None:
    models = tomllib.loads(MODELS_FILE.read_text(encoding="utf-8"))["model"]
    path = Path(str(COUNTED_FILE))
    counted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    kept = {}
    for model in models:
        name, config = model["name"], model["config"]
        if config["model_type"] in MODEL_TYPES:
            continue
        if names and name not in names and name in counted["models"]:
            kept[name] = counted["models"][name]
            continue
        shape = count_shape(config, name, model["source"])
        values = asdict(shape)
        kept[name] = {
            key: values[key]
            for key in (
                "hidden",
                "vocabulary",
                "tied",
                "total",
                "model_type",
                "context_length",
                "adapter_rank",
                "kinds",
            )
        }
        print(f"{name}: {shape.parameters:,}, active {shape.active_parameters:,}", file=sys.stderr, flush=True)
        content = {"transformers": transformers.__version__, "models": counted["models"] | kept}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.write_text(
        json.dumps({"transformers": transformers.__version__, "models": kept}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
