"""OpenAI's HTTP interface over one engine: `python -m nemotriton.serve MODEL`."""
