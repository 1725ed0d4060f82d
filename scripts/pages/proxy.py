"""The tables of docs/agents.md, measured by scripts/measure_proxy.py."""

from __future__ import annotations

from pages.markdown import Data, load, table

NAMES = {"before": "before", "now": "now"}


def proxy_block(report: Data | None = None) -> str:
    """Write what clients of the proxy wait for, what is read of repeated prompts, and an engine's pace alone and through us."""
    report = load("proxy") if report is None else report
    if report is None:
        return "Not measured yet: `python scripts/measure_proxy.py` runs it, and `make docs` writes this."
    parts = list[str]()
    if "clients" in report:
        rows = {(row["source"], row["clients"]): row for row in report["clients"]}
        heads = [name for name in NAMES if any(source == name for source, _ in rows)]
        cells = []
        for clients in sorted({clients for _, clients in rows}):
            both = [rows[name, clients] for name in heads]
            cells.append(
                (
                    str(clients),
                    " → ".join(f"{row['tokens_per_second']:.0f}" for row in both),
                    " → ".join(f"{row['seconds']:.2f}" for row in both),
                    " → ".join(f"{row['seconds_of_short']:.2f}" for row in both),
                )
            )
        parts += [
            "`policygrad proxy` and the embedded model on a shared machine of two cores; clients that send one request after "
            "another, every other one of 8 tokens, the others of up to 160. Before requests joined a running batch → now, medians:",
            table(("clients", "tokens per second", "seconds to an answer", "to one of 8 tokens"), cells),
        ]
    if "prompts" in report:
        by_source = {row["source"]: row for row in report["prompts"]}
        read = " → ".join(f"{by_source[name]['tokens_read']:,}" for name in NAMES if name in by_source)
        seconds = " → ".join(f"{by_source[name]['seconds']:.0f}" for name in NAMES if name in by_source)
        parts.append(
            f"Eight agents with the same 12,000 tokens of instructions, two turns each, two agents in a batch: of "
            f"{by_source['now']['prompt_tokens']:,} tokens of prompts the model reads {read}, in {seconds} seconds."
        )
    if "engine" in report:
        row = report["engine"]
        parts.append(
            f"A vLLM server on a CPU with {row['clients']} clients at once: {row['alone']:.0f} tokens per second asked directly, "
            f"{row['through']:.0f} as the programs of {row['clients']} episodes, {row['through'] / row['alone']:.2f} of it "
            "(starting and ending the programs included, on the same two cores)."
        )
    parts.append("`python scripts/measure_proxy.py --before CHECKOUT --vllm VENV` measures this.")
    return "\n\n".join(parts)
