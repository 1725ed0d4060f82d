"""What there is to say of the parts' own defaults, whatever the algorithm."""

from __future__ import annotations

USUAL: dict[str, str] = {
    "SequenceSum.group_power": "1: a plain mean",
    "FirstOrder.epochs": "1: every rollout is used once",
    "FirstOrder.minibatches": "1: a rollout is not split",
    "KLInReward.level": "token: each token answers for the KL to go, as in PPO for language",
    "SoftOverlong.scale": "1, as in DAPO",
    "KLInReward.form": "k1, the only form that gives the gradient of the sequence's KL",
    "Reference.every": "open: frozen, as everywhere but in iterative GRPO and ProRL",
    "Reference.reset": "off",
    "Reference.stall": "open: off",
    "Reference.model": "open: the model that the run began with",
    "Critic.features": "own, as everywhere in the literature on language models",
    "Critic.hidden": "0: means something with features = policy only",
    "Critic.gamma": "1: an episode is one answer",
    "Critic.turn_gamma": "1: nothing is discounted per turn",
    "Critic.pretrain": "0: none",
    "Critic.explained": "our choice; without pre-training it means nothing",
    "GroupStd.eps": "our choice, and that of common code",
    "BatchStd.eps": "our choice, as for the group's std",
    "BatchStd.of": "the centred advantages, as in Magistral",
    "Whiten.eps": "verl's masked_whiten: added to the variance, under the root",
    "MaskTruncated.keep_in_statistics": "off: a masked answer is as if it had not been sampled",
    "GAE.bootstrap": "off: an answer that the budget cut off has ended",
    "NStep.bootstrap": "off: an answer that the budget cut off has ended",
    "LengthAdaptiveGAE.bootstrap": "off: an answer that the budget cut off has ended",
    "ProcessReward.outcome": "on, our choice: the task's reward scores the last step; sec. 4.1.3 has process rewards alone",
    "Downsample.keep": "our choice: half of the usual eight; no algorithm has it",
    "DropNoSpread.carry": "our choice: so that nothing good is thrown away; no paper says what becomes of it",
}
"""`Part.setting` -> what there is to say of a part's own default where no paper speaks of it."""
RECIPE = frozenset({"FirstOrder.epochs", "FirstOrder.minibatches"})
"""Settings that no row has from its parent: how often a rollout is used is each paper's own, also where the number is the same."""
