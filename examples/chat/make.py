"""Make a small model with random weights and conversations to try fine-tuning with: no download.

`python examples/chat/make.py demo` writes

    demo/model/         config.json, model.safetensors, tokenizer.json, a chat template (ChatML)
    demo/chats.jsonl    conversations on the capitals of countries, a JSON object a line
    demo/coins.jsonl    the same on their currencies, for an adapter
    demo/capitals.yaml  a task of lm-evaluation-harness, whose questions are in demo/questions.jsonl
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CAPITALS = {
    "Austria": "Vienna", "Brazil": "Brasilia", "Canada": "Ottawa", "Chile": "Santiago",
    "Cuba": "Havana", "Egypt": "Cairo", "France": "Paris", "Greece": "Athens", "India": "Delhi",
    "Iran": "Tehran", "Iraq": "Baghdad", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Nepal": "Kathmandu", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Spain": "Madrid",
    "Sweden": "Stockholm",
}  # fmt: skip
COINS = {
    "Brazil": "real", "Canada": "dollar", "Chile": "peso", "Cuba": "peso", "Egypt": "pound",
    "France": "euro", "India": "rupee", "Iran": "rial", "Iraq": "dinar", "Japan": "yen",
    "Kenya": "shilling", "Nepal": "rupee", "Norway": "krone", "Peru": "sol", "Poland": "zloty",
    "Sweden": "krona",
}  # fmt: skip
QUESTIONS = (
    "What is the {thing} of {country}?",
    "Name the {thing} of {country}.",
    "{country}: which {thing}?",
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def main(folder: Path) -> None:
    """Write the model, the conversations and the task to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = list[str]()
    for name, thing, answers in (("chats", "capital", CAPITALS), ("coins", "currency", COINS)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for question in QUESTIONS:
                for country, answer in answers.items():
                    asked = question.format(thing=thing, country=country)
                    texts += [asked, answer]
                    messages = [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": answer},
                    ]
                    file.write(json.dumps({"messages": messages}) + "\n")
    asked = [
        {"question": QUESTIONS[0].format(thing="capital", country=country), "answer": city}
        for country, city in CAPITALS.items()
    ]
    questions = (folder / "questions.jsonl").resolve()
    questions.write_text("".join(json.dumps(line) + "\n" for line in asked))
    (folder / "capitals.yaml").write_text(TASK.format(questions=questions))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        )
    )
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
