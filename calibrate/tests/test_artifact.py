import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calibrate.artifact import (METADATA_KEY, Artifact, ArtifactError, Features, Functions, fingerprint, model_shape,
                                read, storable_weight, write)


def random_artifact(model):
    torch.manual_seed(1)
    bf16 = lambda *shape: torch.randn(*shape).to(torch.bfloat16)
    hata, spotlight, features = Functions("hata", 64), Functions("spotlight", 128, "group"), Features(8)
    for layer in (1, 2):
        hata.layers[layer] = {side: [(bf16(2, 64, 16), torch.randn(2, 64))] for side in ("key", "query")}
        spotlight.layers[layer] = {"key": [(bf16(2, 24, 16), torch.randn(2, 24)), (bf16(2, 128, 24), torch.randn(2, 128))],
                                   "query": [(bf16(2, 20, 32), torch.randn(2, 20)), (bf16(2, 256, 20), torch.randn(2, 256))]}
        dims = {"stem": (16, 16), "gate": (12, 16), "up": (12, 16), "down": (16, 12), "out": (8, 16)}
        features.layers[layer] = {side: {role: (bf16(2, *d), torch.randn(2, d[0])) for role, d in dims.items()}
                                  for side in ("key", "query")}
    hata.measured = {"2%": {"iou": [0.5, 0.25]}}
    return Artifact(fingerprint(model), model_shape(model), 1, {"hata": hata, "spotlight": spotlight}, features)


def test_round_trip(tiny_model, tmp_path):
    artifact = random_artifact(tiny_model)
    write(tmp_path / "a.safetensors", artifact)
    again = read(tmp_path / "a.safetensors", tiny_model)
    assert again.fingerprint == artifact.fingerprint and again.dense_layers == 1
    assert again.functions["hata"].measured == {"2%": {"iou": [0.5, 0.25]}}
    for kind, functions in artifact.functions.items():
        assert again.functions[kind].bits == functions.bits
        for layer, sides in functions.layers.items():
            for side, stages in sides.items():
                for mine, theirs in zip(stages, again.functions[kind].layers[layer][side], strict=True):
                    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    for layer, sides in artifact.features.layers.items():
        for side, roles in sides.items():
            for role, pair in roles.items():
                assert all(torch.equal(a, b) for a, b in zip(pair, again.features.layers[layer][side][role]))


def test_header_is_one_json_string(tiny_model, tmp_path):
    write(tmp_path / "a.safetensors", random_artifact(tiny_model))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    assert list(metadata) == [METADATA_KEY]
    header = json.loads(metadata[METADATA_KEY])
    assert header["format"] == 1 and header["kinds"]["hata"] == {
        "bits": 64, "query": "head", "stages": 1, "layers": [1, 2], "training": {}, "measured": {"2%": {"iou": [0.5, 0.25]}}}


def damaged(path, change_tensors=None, change_header=None):
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[METADATA_KEY])
    tensors = load_file(path)
    if change_tensors:
        change_tensors(tensors)
    if change_header:
        change_header(header)
    out = path.with_name("damaged.safetensors")
    save_file(tensors, out, metadata={METADATA_KEY: json.dumps(header)})
    return out


@pytest.mark.parametrize("tensors, header, message", [
    (lambda t: t.pop("layers.1.hata.key.0.weight"), None, "layers.1.hata.key.0.weight is missing"),
    (lambda t: t.update({"layers.1.hata.key.0.weight": torch.zeros(2, 64, 17, dtype=torch.bfloat16)}), None, "shape"),
    (lambda t: t.update({"layers.2.hata.key.0.bias": torch.zeros(3, 64)}), None, "shape"),
    (lambda t: t.update({"layers.1.hata.key.0.weight": torch.zeros(2, 64, 16)}), None, "type"),
    (lambda t: t["layers.1.hata.query.0.bias"].fill_(float("nan")), None, "not finite"),
    (lambda t: t.update({"surprise": torch.zeros(1)}), None, "unknown tensors"),
    (None, lambda h: h.update(format=2), "format 2"),
    (None, lambda h: h["kinds"]["hata"].update(bits=100), "100 bits"),
    (None, lambda h: h["kinds"]["hata"].update(layers=[1, 9]), "layer 9"),
    (None, lambda h: h["kinds"]["spotlight"].update(query="head"), "shape"),
    (None, lambda h: h["kinds"]["spotlight"].update(query="both"), "of kind 'both'"),
    (None, lambda h: h["model"].update(kv_heads=4), "kv_heads"),
    (None, lambda h: h["model"].update(fingerprint="00"), "another model"),
])
def test_damage_is_named(tiny_model, tmp_path, tensors, header, message):
    write(tmp_path / "a.safetensors", random_artifact(tiny_model))
    with pytest.raises(ArtifactError, match=message):
        read(damaged(tmp_path / "a.safetensors", tensors, header), tiny_model)


def test_fingerprint_changes_with_the_model_and_only_with_it(tiny_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    original = fingerprint(tiny_model)
    assert fingerprint(copy) == original and len(original) == 64
    config = json.loads((copy / "config.json").read_text())

    (copy / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "use_cache": False}))
    assert fingerprint(copy) == original
    theta = {"rope_theta": 12345.0, "rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"}}
    (copy / "config.json").write_text(json.dumps({**config, **theta}))
    assert fingerprint(copy) != original
    (copy / "config.json").write_text(json.dumps(config))

    weights = load_file(copy / "model.safetensors")
    name = "model.layers.2.self_attn.k_proj.weight"
    weights[name][0, 0] += 1.0
    save_file(weights, copy / "model.safetensors")
    assert fingerprint(copy) != original


def test_fingerprint_is_the_same_for_shards(tiny_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({n: weights[n] for n in some}, copy / file)
    (copy / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {n: file for file, some in halves.items() for n in some}}))
    assert fingerprint(copy) == fingerprint(tiny_model)


def test_tiny_weights_are_stored_as_zero():
    weight = storable_weight(torch.tensor([2.0 ** -31, -(2.0 ** -29), 1.0]))
    assert weight.tolist() == [0.0, -(2.0 ** -29), 1.0] and weight.dtype == torch.bfloat16


GOLDEN = json.loads((Path(__file__).parents[2] / "tests/golden/fingerprint.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["what"])
def test_fingerprint_is_that_of_the_server(case, tmp_path):
    header = GOLDEN["header"].encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(GOLDEN["data"]))
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    assert fingerprint(tmp_path) == case["fingerprint"]
