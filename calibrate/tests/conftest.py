import json
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root: `import calibrate`


def pytest_report_header():
    return f"torch {torch.__version__}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama of 3 layers, 4 query and 2 KV heads of dimension 16, with a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(["<|begin|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>")
    wrapped.chat_template = ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
                             "{% if add_generation_prompt %}>{% endif %}")
    wrapped.save_pretrained(directory)
    torch.manual_seed(7)
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, vocab_size=len(vocabulary), max_position_embeddings=4096,
                         initializer_range=0.25, bos_token_id=0, eos_token_id=None)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 3
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    rng = random.Random(3)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8))) for _ in range(300)]
    lines = [" ".join(rng.choice(words) for _ in range(14)) for _ in range(600)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def corpus(tiny_model, text_file, tmp_path_factory):
    """Captured shards of layers 1 and 2 and the corpus over them."""
    from calibrate.capture import CaptureSettings, Model, capture
    from calibrate.documents import Text
    from calibrate.region import Region
    from calibrate.training import Corpus

    settings = CaptureSettings(lengths=(1000,), documents=2, validation_documents=2, text_queries=40, questions=3,
                               first_position=500, layers=(1, 2), sink=4, window=192)
    paths = capture(Model(tiny_model), Text(text_file), settings, tmp_path_factory.mktemp("capture"))
    corpus = Corpus(paths[:2], (1, 2), 2, 16, Region(4, 192), "cpu")
    corpus.paths = paths
    return corpus
