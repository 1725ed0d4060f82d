"""A run on a Ray cluster: who learns, draws, judges and plays is an actor. Placing, starting again and sending are Ray's."""
