"""What the benchmarks are made of: the works, the clocks, the results that are kept, and the page."""
