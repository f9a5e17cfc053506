"""The embedded default model, preset `tiny`: weights, tokenizer, card; an NVFP4/FP8 copy in mixed/.

What it is, where it comes from and what it can do stands in README.md beside this file.
"""
