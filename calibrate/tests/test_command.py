"""The command from end to end on a tiny model."""

import json

import pytest
import torch

from calibrate.__main__ import main, parse_bits, parse_layers
from calibrate.artifact import read
from calibrate.capture import CaptureSettings, Model, capture, load_shard
from calibrate.documents import Text
from calibrate.evaluate import main as evaluate
from calibrate.evaluate import run_text
from calibrate.policies import Policy
from calibrate.region import Region

FEW = ["--documents", "2", "--validation-documents", "2", "--lengths", "600", "--steps", "3", "--feature-steps", "3",
       "--features", "8", "--dense-layers", "1", "--sink", "4", "--window", "64", "--queries", "16"]


def command(model, text, out, *more):
    return main(["--model", str(model), "--text", str(text), "--out", str(out), *FEW, *more])


def test_writes_artifact_and_report_and_resumes(tiny_model, text_file, tmp_path, capsys):
    out, state = tmp_path / "a.safetensors", tmp_path / "state"
    assert command(tiny_model, text_file, out, "--resume", str(state), "--report", str(tmp_path / "report")) == 0
    artifact = read(out, tiny_model)
    assert set(artifact.functions) == {"hata", "spotlight", "hashattention"} and artifact.features.features == 8
    assert artifact.functions["hashattention"].bits == 32 and sorted(artifact.functions["hata"].layers) == [1, 2]
    measured = artifact.functions["spotlight"].measured["2%"]
    assert len(measured["iou"]) == 4 and all(0.0 <= x <= 1.0 for x in measured["recall"])
    assert "IoU with the oracle" in (tmp_path / "report" / "report.txt").read_text()
    assert (tmp_path / "report" / "report.png").stat().st_size > 1000
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["policies"]["oracle:k=2%"]["iou"] == [1.0] * 4

    again = tmp_path / "b.safetensors"
    assert command(tiny_model, text_file, again, "--resume", str(state)) == 0
    assert again.read_bytes() == out.read_bytes()
    fresh = tmp_path / "c.safetensors"
    assert command(tiny_model, text_file, fresh) == 0
    assert fresh.read_bytes() == out.read_bytes()

    capsys.readouterr()
    result = tmp_path / "result.json"
    assert evaluate(["--model", str(tiny_model), "--artifact", str(out), "--captured", str(state / "capture"),
                     "--dense-layers", "1", "--sink", "4", "--window", "64", "--policy", "dense",
                     "--policy", "spotlight:k=2%,completion=on", "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["captured"]
    assert rows[0]["policy"] == "dense" and rows[0]["error"] < 1e-2
    assert {r["policy"] for r in rows} == {"dense", "spotlight:k=2%,completion=on"}


def test_recipe_paper_has_the_functions_of_the_papers(tiny_model, text_file, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    assert command(tiny_model, text_file, out, "--recipe", "paper", "--kinds", "hata,spotlight,hashattention", "--report",
                   str(tmp_path / "report")) == 0
    artifact = read(out, tiny_model)
    assert artifact.features is None
    for kind, functions in artifact.functions.items():
        assert functions.training["recipe"] == "paper" and functions.training["moved"] == 0.0
        for sides in functions.layers.values():
            if kind == "hashattention":  # of each of the two query heads its own: nothing between them
                assert functions.query == "group" and functions.training["query"] == "each"
                for weight, _ in sides["query"]:
                    rows, columns = weight.shape[1] // 2, weight.shape[2] // 2
                    assert weight[:, :rows, columns:].abs().max() == 0 and weight[:, rows:, :columns].abs().max() == 0
                    assert not torch.equal(weight[:, :rows, :columns], weight[:, rows:, columns:])
            else:  # the keys' own, without a bias at the end
                assert functions.query == "head" and functions.training["query"] == "shared"
                for (w, b), (w2, b2) in zip(sides["key"], sides["query"], strict=True):
                    assert torch.equal(w, w2) and torch.equal(b, b2)
                assert sides["key"][-1][1].abs().max() == 0
    rows = (tmp_path / "report" / "report.md").read_text().splitlines()
    assert rows[0] == "| policy | IoU | recall | coverage | error |"
    assert {r.split("`")[1] for r in rows[2:]} >= {"hata:k=2%", "spotlight:k=2%", "hashattention:k=2%", "oracle:k=2%"}
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(report["documents"]["hata:k=2%"]["iou"]) == 2 and report["documents"]["oracle:k=2%"]["iou"] == [1.0, 1.0]


def test_other_settings_in_the_same_state_are_refused(tiny_model, text_file, tmp_path):
    state = str(tmp_path / "state")
    kinds = ["--kinds", "hata"]
    command(tiny_model, text_file, tmp_path / "a.safetensors", "--resume", state, *kinds)
    with pytest.raises(ValueError, match="other settings"):
        command(tiny_model, text_file, tmp_path / "a.safetensors", "--resume", state, "--seed", "5", *kinds)


@pytest.mark.parametrize("options", [["--kinds", "nonsense"], ["--bits", "100"], ["--bits", "features=64"]])
def test_impossible_options_are_refused(tiny_model, text_file, tmp_path, options, capsys):
    with pytest.raises(SystemExit):
        command(tiny_model, text_file, tmp_path / "a.safetensors", *options)
    assert options[0] in capsys.readouterr().err


def test_bits_and_layers():
    assert parse_bits("", ["hata", "hashattention"]) == {"hata": 128, "hashattention": 32}
    assert parse_bits("256", ["hata", "hashattention"]) == {"hata": 256, "hashattention": 256}
    assert parse_bits("hata=64", ["hata", "spotlight"]) == {"hata": 64, "spotlight": 128}
    assert parse_layers(None, 2, 6) == (2, 3, 4, 5) and parse_layers("1-2,4", 2, 6) == (1, 2, 4)
    with pytest.raises(ValueError):
        parse_layers("5-6", 2, 6)


@pytest.mark.parametrize("text", ["magic", "hata", "hata:k=0%", "oracle:k=2%,p=0", "hata:k=2%,p=1.5", "window:p=0.9", "hata:p=0.9",
                                  "hata:k=2%,bits=64"])
def test_impossible_policies_are_refused(text):
    with pytest.raises(ValueError):
        Policy.parse(text)


def test_captured_state_is_that_of_the_model(tiny_model, text_file, tmp_path):
    """Keys, queries and the anchors' state, put together, give the attention that the model computed."""
    settings = CaptureSettings(lengths=(700,), documents=1, validation_documents=0, text_queries=24, questions=2,
                               first_position=300, layers=(2,), sink=4, window=192)
    model = Model(tiny_model)
    (path,) = capture(model, Text(text_file), settings, tmp_path)
    shard = load_shard(path, (2,), 2)
    assert shard.kind == "needle" and shard.q.shape[:2] == (2, 2) and (shard.answers == 1).sum() > 10
    k, v, q = shard.k.float(), shard.v.float(), shard.q.float()
    mid = Region(4, 192).mid_mask(shard.positions, shard.length)
    logits = torch.einsum("ngmd,nld->ngml", q, k) * model.scaling
    p = torch.exp(logits - shard.lse.unsqueeze(-1)) * mid
    mass = torch.exp(shard.anchor_lse - shard.lse) + p.sum(-1)
    assert torch.allclose(mass, torch.ones_like(mass), atol=1e-4)
    # For queries of the document itself, dense attention over the stored keys is the whole truth.
    own = shard.positions < shard.length
    causal = torch.arange(shard.length) <= shard.positions[own].unsqueeze(1)
    dense = torch.softmax(logits[:, :, own].masked_fill(~causal, -1e30), -1) @ v.unsqueeze(1)
    joined = p @ v.unsqueeze(1) + torch.exp(shard.anchor_lse - shard.lse).unsqueeze(-1) * shard.anchor.float()
    assert torch.allclose(joined[:, :, own], dense, atol=2e-2)


def test_reading_everything_has_the_perplexity_of_dense(tiny_model, text_file):
    model = Model(tiny_model)
    rows = run_text(model, str(text_file), [Policy("dense"), Policy("oracle", count=1000), Policy("window")], None, 1,
                    Region(4, 64), length=512, windows=1, skip=128)
    dense, everything, window = (r["perplexity"] for r in rows)
    assert abs(everything / dense - 1) < 2e-2 and abs(window / dense - 1) > 1e-4
