"""Classic control: the library's gates, advantages, critic and update rules on Gymnasium environments.

The policy is a small network, actions take the place of tokens, and episodes that of completions. Everything else is core.
"""
