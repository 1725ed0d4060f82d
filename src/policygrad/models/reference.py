"""Another model beside the policy, to compare it with: a reference that is not where it began, or a teacher."""

from __future__ import annotations

from torch import nn

from policygrad.errors import ModelError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer


def load_reference(
    name: str, policy: Tokenizer, *, dtype: str = "fp32", device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """The model, frozen. It is given the token ids that the policy sampled, so both must mean the same by them.

    name: a folder, a hub id, a run's folder, `tiny`. policy: the policy's tokenizer.

    Raises:
        ModelError: no such model; a tokenizer with another vocabulary than the policy's, or than the model has embeddings for.
    """
    model = load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code).requires_grad_(False)
    tokenizer = load_tokenizer(name, model, trust_remote_code=trust_remote_code)
    ours, theirs = policy.hf.get_vocab(), tokenizer.hf.get_vocab()
    if odd := sorted(ours.items() ^ theirs.items(), key=lambda item: item[1]):
        text = odd[0][0]
        where = {model: ids.get(text, "no token") for model, ids in (("the policy", ours), (name, theirs))}
        raise ModelError(
            f"the reference {name!r} reads the policy's token ids, and its vocabulary is another: {len({t for t, _ in odd})} "
            f"tokens differ, {text!r} say, which is {where['the policy']} in the policy's and {where[name]} in its own. Take a "
            "model with the policy's tokenizer, of the same family say"
        )
    return model
