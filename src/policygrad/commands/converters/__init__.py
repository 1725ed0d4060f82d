"""What `policygrad convert` knows of other libraries: one file each, and what they share."""
