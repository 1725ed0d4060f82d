"""Stand-ins that tests share: the smallest policy there is, samplers that lag or fail, a tracker that remembers."""
