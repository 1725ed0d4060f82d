"""The learner in many processes: weights, gradients and moments spread over them (FSDP2), one of them in command."""
