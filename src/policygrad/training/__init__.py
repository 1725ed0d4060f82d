"""The loop, and the lifecycle around it: reinforcement learning, fine-tuning and reward models, from configuration to result."""
