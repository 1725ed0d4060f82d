"""The papers' objectives, written out token by token in float64, to check a gradient against.

They share no code with `core`: loops over prompts, completions and sampled tokens, on Python numbers and autograd. The tests
compare every named algorithm with them, and `objectives.paper_objective` evaluates one on the batch of a run.
"""
