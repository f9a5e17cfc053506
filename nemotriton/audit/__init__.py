"""`python -m nemotriton.audit`: what is in a checkpoint, what fits, and which op is wrong."""
