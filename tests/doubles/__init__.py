"""What tests share: stand-ins (policies, samplers, trackers, a notebook), batches, models, and the papers written out."""
