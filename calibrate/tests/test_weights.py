"""Reading a model a layer at a time, from a directory and from GGUF."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.artifact import fingerprint, model_shape
from calibrate.capture import CaptureSettings, Model, capture
from calibrate.documents import Text
from calibrate.weights import open_weights

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = CaptureSettings(lengths=(500,), documents=2, validation_documents=1, text_queries=24, questions=3,
                           first_position=200, layers=(1, 2), sink=4, window=192)


def same_captures(one: list[Path], other: list[Path]) -> bool:
    pairs = [(load_file(a), load_file(b)) for a, b in zip(one, other, strict=True)]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_a_layer_at_a_time_captures_the_same(tiny_model, text_file, tmp_path):
    text = Text(text_file)
    resident = capture(Model(tiny_model), text, SETTINGS, tmp_path / "resident")
    streaming = Model(tiny_model, resident_bytes=0)
    assert len(streaming._layers) == 1
    streamed = capture(streaming, text, SETTINGS, tmp_path / "streamed")
    assert same_captures(resident, streamed)


@pytest.mark.parametrize("resident_bytes", [0, 1 << 30])
def test_logits_are_those_of_transformers(tiny_model, resident_bytes):
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 257, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    model = Model(tiny_model, resident_bytes=resident_bytes)
    whole, _ = model.run(ids, hidden_only=False)
    assert torch.allclose(whole, expected, atol=1e-4)
    # The same in two calls, the second of them twice.
    _, cache = model.run(ids[:40])
    for _ in range(2):
        rest, _ = model.run(ids[40:], cache, hidden_only=False)
        cache.drop(20)
        assert torch.allclose(rest, expected[40:], atol=1e-4)


def test_a_missing_tensor_is_named(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "copy" / "model.safetensors")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight"):
        Model(tmp_path / "copy")


def test_weights_that_are_not_numbers_of_a_float_type_are_refused(tmp_path):
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a.weight has type torch.uint8"):
        next(open_weights(tmp_path).tensors(["a.weight"]))


LAYERS, WIDTH, INNER = 12, 2048, 5632


@pytest.fixture(scope="module")
def large_model(tiny_model, tmp_path_factory):
    """A random Llama of 12 layers of 45M parameters, a file for each: 1.1 GB of bfloat16, 2.2 GB of float32."""
    directory = tmp_path_factory.mktemp("large")
    shutil.copytree(tiny_model, directory, dirs_exist_ok=True)
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    config.update(num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=16,
                  num_key_value_heads=4, head_dim=128)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    random = lambda *shape: (torch.randn(*shape, generator=generator) * 0.03).to(torch.bfloat16)
    layer = {"self_attn.q_proj": random(2048, WIDTH), "self_attn.k_proj": random(512, WIDTH),
             "self_attn.v_proj": random(512, WIDTH), "self_attn.o_proj": random(WIDTH, 2048),
             "mlp.gate_proj": random(INNER, WIDTH), "mlp.up_proj": random(INNER, WIDTH),
             "mlp.down_proj": random(WIDTH, INNER), "input_layernorm": torch.ones(WIDTH, dtype=torch.bfloat16),
             "post_attention_layernorm": torch.ones(WIDTH, dtype=torch.bfloat16)}
    files = {f"layer-{i}.safetensors": {f"model.layers.{i}.{name}.weight": t for name, t in layer.items()}
             for i in range(LAYERS)}
    files["rest.safetensors"] = {"model.embed_tokens.weight": random(config["vocab_size"], WIDTH),
                                 "lm_head.weight": random(config["vocab_size"], WIDTH),
                                 "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16)}
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}))
    yield directory
    shutil.rmtree(directory)


PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from calibrate.capture import CaptureSettings, Model, capture
from calibrate.documents import Text

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024

Model(sys.argv[4])  # a small one, for what every model takes once
text = Text(sys.argv[3])
print(peak())
model = Model(sys.argv[2])
for layers in (2, 12):
    settings = CaptureSettings(lengths=(250,), documents=1, validation_documents=0, text_queries=8, questions=2,
                               first_position=100, layers=tuple(range(layers)), sink=4, window=64)
    capture(model, text, settings, Path(sys.argv[5]) / str(layers))
    print(peak())
"""


def test_a_model_larger_than_memory_is_read_a_layer_at_a_time(large_model, tiny_model, text_file, tmp_path):
    parameters = 2 * 2048 * WIDTH + 2 * 512 * WIDTH + 3 * INNER * WIDTH
    result = subprocess.run([sys.executable, "-c", PEAK, *map(str, (ROOT, large_model, text_file, tiny_model, tmp_path / "c"))],
                            capture_output=True, text=True, check=True)
    before, two, twelve = map(int, result.stdout.split())
    # Ten more layers take what is recorded of them, 5 MB each, and not their weights: less than one layer has in the file.
    assert twelve - two < 2 * parameters
    # A layer in float32 and its bfloat16 pages are 6 bytes a parameter; the other 4 are what the first products take once:
    # their libraries' pages and a packed copy of the largest matrix. The model's files are 24.
    assert two - before < 10 * parameters < LAYERS * parameters * 2 / 2
    assert (tmp_path / "c" / "12" / "train-0000.safetensors").stat().st_size > 100_000


# --- GGUF ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def gguf_model(tiny_model, tmp_path_factory):
    """tiny_model as a GGUF file of float32, with the rows of Q and K in the order of llama files.

    It has one more token, "zq", because such a file needs a merge.
    """
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = json.loads((tiny_model / "config.json").read_text())
    tensors = load_file(tiny_model / "model.safetensors")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"] + 1)
    vocabulary = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.get), "zq"])
    writer.add_token_types([3] + [1] * len(vocabulary))
    writer.add_token_merges(["z q"])
    writer.add_bos_token_id(0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        values = tensor.float()
        if stem.startswith("model.layers."):
            number, role = stem.removeprefix("model.layers.").split(".", 1)
            if role in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = values.shape[0] // 16
                values = values.view(heads, 2, 8, 64).transpose(1, 2).reshape(values.shape)
            stem = f"blk.{number}.{names[role]}"
        else:
            if stem != "model.norm":
                values = torch.cat([values, torch.zeros(1, 64)])
            stem = names[stem]
        writer.add_tensor(stem + ".weight", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("resident_bytes", [0, 1 << 30])
def test_a_gguf_file_is_the_model_of_its_directory(tiny_model, gguf_model, resident_bytes):
    ids = torch.randint(0, 257, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    expected, _ = Model(tiny_model).run(ids, hidden_only=False)
    model = Model(gguf_model, resident_bytes=resident_bytes)
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim) == (3, 4, 2, 16)
    got, _ = model.run(ids, hidden_only=False)
    assert torch.allclose(got[:, :-1], expected, atol=1e-5)
    assert model_shape(gguf_model) == model_shape(tiny_model)
    text = "some words, 123"
    encode = lambda m: m.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(model) == encode(Model(tiny_model))


def numbered_gguf(path: Path) -> None:
    """A GGUF file that winnow serves, of counted values: 2 layers, 2 query heads and a KV head of 64, two tensors of Q8_0."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(160)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    tokens = ["<s>", *gguf_bytes(), "zq"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["z q"])
    writer.add_bos_token_id(0)
    shapes = {"token_embd": (258, 128), "output": (258, 128), "output_norm": (128,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in {
            "attn_norm": (128,), "ffn_norm": (128,), "attn_q": (128, 128), "attn_k": (64, 128), "attn_v": (64, 128),
            "attn_output": (128, 128), "ffn_gate": (160, 128), "ffn_up": (160, 128), "ffn_down": (128, 160)}.items()}
    for number, (name, shape) in enumerate(shapes.items()):
        values = ((np.arange(np.prod(shape)) * 7 + number) % 251 / 1000.0).astype(np.float32).reshape(shape)
        if name in ("blk.0.attn_q", "blk.1.ffn_up"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name + ".weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name + ".weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_bytes() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_fingerprint_of_a_gguf_file(tmp_path):
    """The server's, of `winnow eval --artifact`: it takes a file of this fingerprint, and names it where it is another."""
    numbered_gguf(tmp_path / "numbered.gguf")
    assert fingerprint(tmp_path / "numbered.gguf") == "dd635c403d72098e8c81b10663809bd631d57d238a95135170cf9cd09346c0c7"
