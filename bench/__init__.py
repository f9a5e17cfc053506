"""Measuring: kernels against the GPU's own ceilings, against peers, and against an earlier run."""
