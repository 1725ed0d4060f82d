"""Classic control: the library's gates, advantages, critic and steps on Gymnasium environments.

A policy here is a small network, an action stands where a token would, and an episode where a completion would. What is
done with them is core's.
"""
