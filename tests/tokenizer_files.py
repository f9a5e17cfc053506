"""A small byte-level BPE in the family's format, made on the fly."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]  # special: not in the text
THINK = ["<think>", "</think>"]  # added but not special: stay in the text
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think></think>' }}"
    "{% endif %}"
)
CORPUS = [
    "hello world, the cat sat on the mat and the hat sat on the cat",
    "naïve café 你好世界 🙂👩‍👩‍👧 e\u0301 mL eBay 12345  two spaces\n",
]


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja; CONTROL and THINK come first."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=CONTROL + THINK,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS * 4, trainer)
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    data = json.loads((directory / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in THINK
    data["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (directory / "tokenizer.json").write_text(json.dumps(data))
    declared = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(declared))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
