"""Pages about runs: `bertsmith report`."""
