"""Split a large file into folders that a size limit lets through, and join them on the other side.

    python scripts/pieces.py split FILE FOLDER [--mib 36]   FOLDER/1, FOLDER/2, …
    python scripts/pieces.py join FOLDER FILE               checks the SHA-256 of the whole

Each piece lies in a folder of its own, with the checksum, so that they can travel one after the other and in any order.
"""

from __future__ import annotations

import argparse
import json
import sys
from hashlib import file_digest
from pathlib import Path

MIB = 2**20
DATA, NOTE = "piece", "piece.json"


def split_file(file: Path, folder: Path, size: int) -> list[Path]:
    """Write pieces of at most `size` bytes, and return their folders."""
    with file.open("rb") as source:
        digest = file_digest(source, "sha256").hexdigest()
        source.seek(0)
        count = max(1, -(-file.stat().st_size // size))
        places = [folder / str(i + 1) for i in range(count)]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            (place / DATA).write_bytes(source.read(size))
            note = {"sha256": digest, "pieces": count, "name": file.name}
            (place / NOTE).write_text(json.dumps(note), encoding="utf-8")
    return places


def join_pieces(folder: Path, file: Path) -> None:
    """Write the file that pieces were made of.

    Raises:
        ValueError: Pieces are missing, are of different files, or were changed on their way.
    """
    notes = {int(x.parent.name): json.loads(x.read_text(encoding="utf-8")) for x in folder.glob(f"*/{NOTE}")}
    if len({note["sha256"] for note in notes.values()}) != 1:
        raise ValueError(f"{folder} holds pieces of {len({n['sha256'] for n in notes.values()})} files, not of one")
    count, digest = next((note["pieces"], note["sha256"]) for note in notes.values())
    if missing := sorted(set(range(1, count + 1)) - set(notes)):
        raise ValueError(f"{folder} lacks the pieces {', '.join(map(str, missing))} of {count}: bring these too")
    part = file.with_name(f"{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w+b") as target:
        for i in range(1, count + 1):
            target.write((folder / str(i) / DATA).read_bytes())
        target.seek(0)
        found = file_digest(target, "sha256").hexdigest()
    if found != digest:
        part.unlink()
        raise ValueError(f"the pieces of {folder} give a file with SHA-256 {found}, not {digest}: bring them again")
    part.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--mib", type=int, default=36, help="of a piece (%(default)s)")
    args = parser.parse_args()
    try:
        if args.action == "join":
            join_pieces(args.source, args.target)
        else:
            print("\n".join(map(str, split_file(args.source, args.target, args.mib * MIB))))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
