"""The page that `policygrad eval --output DIR` writes: the table, and every answer in full, problem by problem."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from policygrad.pages.render import render_page
from policygrad.utils.message_parts import content_text

if TYPE_CHECKING:
    from policygrad.rollout.evaluation import EvaluationResult

WEB = files("policygrad.commands") / "web"
MAX_CHARS = 16 * 2**20  # of prompts and completions on the page; samples.jsonl has all


def render_eval_page(report: Mapping[str, Any], outcomes: Mapping[str, EvaluationResult], command: str) -> str:
    """Render the page.

    Args:
        report: What --json prints.
        outcomes: The results of each model, on the same problems.
        command: What made them.
    """
    problems, chars = list[dict[str, Any]](), 0
    first = next(iter(outcomes.values()))
    for i, prompt in enumerate(first.prompts):
        problem = _describe_problem(i, prompt, outcomes)
        chars += len(problem["prompt"]) + sum(len(s["text"]) for model in problem["models"] for s in model["samples"])
        if problems and chars > MAX_CHARS:
            break
        problems.append(problem)
    rows = report.get("models", [report])
    return render_page(
        WEB / "eval.html",
        {},
        styles=(WEB / "eval.css",),
        scripts=(WEB / "eval.js",),
        rows=rows,
        ks=list(rows[0]["pass"]),
        differences=report.get("differences", ()),
        level=report.get("level"),
        problems=problems,
        total=len(first.prompts),
        command=command,
    )


def _describe_problem(number: int, prompt: Any, outcomes: Mapping[str, EvaluationResult]) -> dict[str, Any]:
    """Return a problem with the answers of each model, and the kinds under which it is listed."""
    models, kinds = list[dict[str, Any]](), set[str]()
    means = list[float]()
    for name, outcome in outcomes.items():
        samples = outcome.problems[number]
        scores = [sample.score for sample in samples]
        means.append(sum(scores) / len(scores) if scores else 0.0)
        if any(sample.truncated for sample in samples):
            kinds.add("truncated")
        if any(sample.reward is None for sample in samples):
            kinds.add("failed")
        kinds.add("mixed" if len(set(scores)) > 1 else "same")
        described = [
            {
                "text": sample.text,
                "score": None if sample.reward is None else f"{sample.reward:.3g}",
                "rewards": ", ".join(
                    f"{key} {'–' if value is None else f'{value:.3g}'}" for key, value in sample.rewards
                ),
                "answer": sample.answer,
                "tokens": sample.tokens,
                "truncated": sample.truncated,
            }
            for sample in samples
        ]
        models.append({"name": name, "mean": f"{means[-1]:.3g}", "samples": described})
    kinds |= {"zero"} if not any(means) else set()
    kinds |= {"better"} if len(means) > 1 and means[0] > max(means[1:]) else set()
    kinds |= {"worse"} if len(means) > 1 and means[0] < max(means[1:]) else set()
    return {"number": number, "prompt": _as_text(prompt), "models": models, "kinds": " ".join(sorted(kinds))}


def _as_text(prompt: Any) -> str:
    """Return a prompt as text: messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {content_text(message.get('content'))}" for message in prompt)
