"""Options of other libraries, answered with ours: one table per library, and who answers."""
