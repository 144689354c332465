"""A team's own package, with functions that run on a fleet of gpuflow."""
