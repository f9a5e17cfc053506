"""`python -m nemotriton.generate`: text from a Nemotron-H model, on the command line."""
