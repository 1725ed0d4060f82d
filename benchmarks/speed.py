"""Parts of a step alone: the head, attention, packing, each of the learner's savings, the share of the matrix-multiply rate, the
rollout against `generate`, whether fewer bits or drafts would pay, rewards beside sampling, and a profile.

    python benchmarks/speed.py [--only head matmul …] [--repeats 3] [--quick]

CPU seconds, medians, one process and one thread unless OMP_NUM_THREADS says otherwise. Prints the tables, and writes them to
docs/benchmarks.md beside what versus_trl.py has measured; --quick has everything small and writes below .bench/quick alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from pathlib import Path

from bench.machine import alike, describe, when
from bench.options import COMPONENTS, parse
from bench.page import component, publish
from bench.store import Store

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    options = parse(__doc__ or "")
    store = Store(options.folder(ROOT) / "bench.json", options.published(ROOT))
    if not options.page:
        store.put("about", "machine", describe())
        for name in COMPONENTS:
            if options.wants(name):
                _measure(store, name, options.quick, options.repeats)
    print(publish(store, ROOT, options.quick))


def _measure(store: Store, name: str, small: bool, repeats: int) -> None:
    from bench import decoding, drafts, kernels, overlap, profiling, savings

    benches = {"head": kernels.head, "attention": kernels.attention, "packing": kernels.packing}
    benches |= {
        "savings": savings.savings,
        "matmul": savings.matmul,
        "compile": savings.compiled,
        "rollout": decoding.rollout,
    }
    benches |= {
        "drafts": drafts.drafts,
        "decoding": decoding.savings,
        "precision": decoding.precision,
        "overlap": overlap.overlap,
        "profile": profiling.profiled,
    }
    command = f"python benchmarks/speed.py --only {name}{' --quick' * small}"
    found = {
        "command": command,
        "taken": when(),
        "machine": alike(),
        "threads": os.environ["OMP_NUM_THREADS"],
        **benches[name](small, repeats).as_dict(),
    }
    store.put("components", name, found)
    print(component(found, found["machine"]), flush=True)


if __name__ == "__main__":
    main()
