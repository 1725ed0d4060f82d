"""What a run will take, before it is begun: memory, seconds, money. Arithmetic on shapes and published figures, without torch."""
