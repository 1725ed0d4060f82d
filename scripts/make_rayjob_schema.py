"""The schema that tests check cluster/kuberay/rayjob.yaml against, from KubeRay's own resource definition.

    python scripts/make_rayjob_schema.py ray.io_rayjobs.yaml v1.7.0

The file is `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of github.com/ray-project/kuberay at that tag. Descriptions are left
out, and what occurs several times (a pod is in it three times) is written once, so that 1.4 MB become some 50 kB; nothing else is
changed. Writes tests/cluster/rayjob.schema.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FINAL = Path(__file__).resolve().parents[1] / "tests" / "cluster" / "rayjob.schema.json"
VERSION = "v1"
"""Of the resource."""
LONG = 200
"""Characters of a part that is worth a name."""
COMMENT = (
    "Made by scripts/make_rayjob_schema.py from ray-operator/config/crd/bases/ray.io_rayjobs.yaml of KubeRay {tag}, "
    "https://github.com/ray-project/kuberay, Apache License 2.0. Changed: without descriptions, repeated parts written once."
)


def schema_of(definition: dict[str, Any], tag: str) -> dict[str, Any]:
    """A JSON schema of the resource."""
    version = next(v for v in definition["spec"]["versions"] if v["name"] == VERSION)
    parts = dict[str, str]()  # a part as JSON -> its name
    result = _folded(_bare(version["schema"]["openAPIV3Schema"]), parts)
    named = {name: json.loads(text) for text, name in parts.items()}
    return {"$comment": COMMENT.format(tag=tag), **named[result["$ref"].rpartition("/")[2]], "$defs": named}


def _bare(x: Any) -> Any:
    """Without descriptions; a property of that name stays."""
    if isinstance(x, list):
        return [_bare(y) for y in x]
    if not isinstance(x, dict):
        return x
    return {key: _bare(y) for key, y in x.items() if key != "description" or not isinstance(y, str)}


def _folded(x: Any, parts: dict[str, str]) -> Any:
    """Long parts by name."""
    if isinstance(x, list):
        return [_folded(y, parts) for y in x]
    if not isinstance(x, dict):
        return x
    made = {key: _folded(y, parts) for key, y in x.items()}
    text = json.dumps(made, sort_keys=True)
    if len(text) < LONG or not isinstance(made.get("type"), str):
        return made
    return {"$ref": f"#/$defs/{parts.setdefault(text, f'part{len(parts)}')}"}


def main(args: Sequence[str]) -> int:
    """Writes the file."""
    if len(args) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    definition = yaml.safe_load(Path(args[0]).read_text(encoding="utf-8"))
    FINAL.write_text(json.dumps(schema_of(definition, args[1])) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
