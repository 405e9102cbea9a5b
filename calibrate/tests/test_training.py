import torch

from calibrate.encoders import Balance
from calibrate.policies import fast_codes
from calibrate.training import (Corpus, EncoderSettings, FeatureSettings, build_encoder, encoder_loss,
                                train_encoder, train_features)
import random

import numpy as np
import pytest

from calibrate import codes
from calibrate.artifact import Functions
from calibrate.training import export_encoder

SMALL = dict(bits=32, hidden=32, steps=60, queries=24, candidates=400)


def test_balance_keeps_dot_products_and_equalises_moments():
    torch.manual_seed(1)
    keys = torch.randn(2, 500, 8) * torch.logspace(-1, 1, 8) + 3.0
    queries = torch.randn(2, 400, 8) @ torch.randn(8, 8)
    balance = Balance.fit(keys, queries)
    k = (keys - balance.mean.unsqueeze(1)) @ balance.key_map.transpose(1, 2)
    q = queries @ balance.query_map.transpose(1, 2)
    expected = queries @ (keys - balance.mean.unsqueeze(1)).transpose(1, 2)
    assert torch.allclose(q @ k.transpose(1, 2), expected, rtol=1e-3, atol=1e-2)
    for x in (k, q):
        moment = x.transpose(1, 2) @ x / x.shape[1]
        off = moment - torch.diag_embed(moment.diagonal(dim1=1, dim2=2))
        assert off.abs().max() < 0.02 * moment.abs().max()
    assert torch.allclose((k ** 2).mean(1), (q ** 2).mean(1), atol=0.02 * float((k ** 2).mean(1).max()))


def test_folded_encoder_equals_the_trained_one(corpus):
    settings = EncoderSettings(kind="spotlight", query="head", **SMALL)
    encoder = build_encoder(corpus, settings, 2)
    keys, queries = corpus.sample()
    folded = encoder.folded()
    for side, x, trained in (("key", keys, encoder.key_activations(keys)),
                             ("query", queries[:, 0], encoder.query_activations(queries[:, :1])[:, 0])):
        for i, (w, b) in enumerate(zip(*folded[side])):
            x = torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))
            x = torch.nn.functional.silu(x) if i == 0 else x
        assert torch.allclose(x, trained, atol=1e-2)


def test_exported_functions_give_the_same_bits_in_every_implementation(corpus):
    encoder, _ = train_encoder(corpus, EncoderSettings(kind="spotlight", **{**SMALL, "steps": 5}), 2, "t")
    functions = Functions("spotlight", 32)
    export_encoder(encoder, (1, 2), 2, functions)
    keys = corpus.shards[0].k[:2].float()  # layer 1, both heads
    stages = functions.layers[1]["key"]
    exact = codes.torch_activations(keys, stages) >= 0
    fast = fast_codes(keys, stages) > 0
    for head in range(2):
        reference = codes.encode(keys[head].numpy(), [(w[head].float().numpy(), b[head].numpy()) for w, b in stages])
        assert np.array_equal(codes.pack(exact[head].numpy()), reference)
    # The simulation sums in another order: bits near zero may differ, no others.
    assert (exact != fast).float().mean() < 0.005


@pytest.mark.parametrize("kind", ["hata", "spotlight", "hashattention"])
@pytest.mark.parametrize("recipe", ["winnow", "paper"])
def test_loss_decreases(corpus, kind, recipe):
    settings = EncoderSettings(kind=kind, recipe=recipe, seed=3, **{**SMALL, "steps": 120})
    trained, history = train_encoder(corpus, settings, 2, "t")
    assert len(history) == 120
    with torch.no_grad():
        losses = []
        for encoder in (build_encoder(corpus, settings, 2), trained):
            total = 0.0
            for i in range(6):  # the same batches for both, not met in training
                generator = torch.Generator().manual_seed(i)
                batch = corpus.batch(random.Random(f"check {i}"), generator, 48, 10_000, 0.02)
                total += float(encoder_loss(encoder, batch, settings, generator).mean())
            losses.append(total)
    assert losses[1] < losses[0]


def test_training_finds_more_than_random_planes(corpus):
    """Agreement of trained codes ranks unseen queries' keys better than the planes training starts from."""
    def share_found(encoder):
        batch = corpus.batch(random.Random("unseen"), torch.Generator().manual_seed(1), 64, 10_000, 0.05)
        sign = lambda x: torch.where(x >= 0, 1.0, -1.0)
        with torch.no_grad():
            scores = sign(encoder.query_activations(batch.queries)).sum(1) @ sign(encoder.key_activations(batch.keys)).transpose(1, 2)
        top = scores.masked_fill(~batch.mid, -1e9).topk(int(batch.k.max()), -1).indices
        return batch.wanted.gather(-1, top).float().mean()

    settings = EncoderSettings(kind="hata", bits=32, hidden=0, steps=200, queries=32, candidates=1000)
    trained, _ = train_encoder(corpus, settings, 2, "t")
    assert share_found(trained) > share_found(build_encoder(corpus, settings, 2)) + 0.03


def test_resumed_training_equals_uninterrupted(corpus, tmp_path):
    settings = EncoderSettings(kind="spotlight", **{**SMALL, "steps": 24})
    straight, _ = train_encoder(corpus, settings, 2, "t")
    train_encoder(corpus, settings, 2, "t", tmp_path / "state.pt", stop_after=11)
    resumed, history = train_encoder(corpus, settings, 2, "t", tmp_path / "state.pt")
    assert len(history) == 24 - 11
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_other_settings_is_refused(corpus, tmp_path):
    settings = EncoderSettings(kind="hata", bits=32, hidden=0, steps=4, queries=8, candidates=200)
    train_encoder(corpus, settings, 2, "t", tmp_path / "state.pt", stop_after=2)
    with pytest.raises(ValueError, match="other settings"):
        train_encoder(corpus, EncoderSettings(kind="hata", bits=64, hidden=0, steps=4, queries=8, candidates=200), 2,
                      "t", tmp_path / "state.pt")


def test_sampled_candidates_stand_for_all(corpus):
    """The weighted sample of unwanted keys counts as many keys as there are."""
    rng = lambda: random.Random("same")
    full = corpus.batch(rng(), torch.Generator().manual_seed(1), 16, 10_000, 0.02)
    some = corpus.batch(rng(), torch.Generator().manual_seed(1), 16, 200, 0.02)
    assert some.keys.shape[1] == 200 and torch.equal(full.queries, some.queries)
    assert torch.allclose(some.weights.sum(1), torch.full((4,), float(full.keys.shape[1])))


def test_a_moved_document_keeps_its_attention(corpus, tiny_model):
    """Products of queries and keys stay; keys become those that the model itself would have at later positions."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotary = AutoModelForCausalLM.from_pretrained(tiny_model).model.rotary_emb
    shard = corpus.shards[0]
    moving = Corpus(corpus.paths[:1], (1, 2), 2, 16, corpus.region, "cpu", rotary.inv_freq, shard.length + 1)
    k, q = shard.k.float(), shard.q.float()
    assert moving.moved(random.Random(1), 0.0, shard.length, q, k)[1] is k
    q1, k1 = moving.moved(random.Random(1), 1.0, shard.length, q, k)
    product = lambda a, b: torch.einsum("ngmd,nld->ngml", a, b)
    assert torch.allclose(product(q1, k1), product(q, k), atol=1e-3) and not torch.allclose(k1, k, atol=0.1)
    at = lambda t: rotary(k, torch.tensor([[t]]))
    plain = torch.randn(1, 1, 1, 16)
    here, there = (apply_rotary_pos_emb(plain, plain, *at(t))[1] for t in (700, 701))
    assert torch.allclose(moving.moved(random.Random(1), 1.0, shard.length, here)[0], there, atol=1e-5)


def test_heads_train_independently(corpus):
    """Half of the heads, trained alone, end with the same weights: no loss, clip or statistic is shared."""
    settings = EncoderSettings(kind="hata", bits=32, hidden=0, steps=10, queries=16, candidates=10_000)
    both = Corpus(corpus.paths[:2], (1, 2), 2, 16, corpus.region, "cpu")
    encoder = build_encoder(both, settings, 2)
    batch = both.batch(random.Random(1), torch.Generator().manual_seed(1), 16, 10_000, 0.02)
    losses = encoder_loss(encoder, batch, settings, torch.Generator())
    losses[0].backward()
    gradient = encoder.key.weights[0].grad
    assert gradient[0].abs().sum() > 0 and gradient[1:].abs().sum() == 0


def test_feature_training_resumes(corpus, tmp_path):
    settings = FeatureSettings(features=8, inner=8, steps=6, queries=8)
    straight, _ = train_features(corpus, settings, "t")
    again, _ = train_features(corpus, settings, "t", tmp_path / "state.pt")
    resumed, history = train_features(corpus, settings, "t", tmp_path / "state.pt")
    assert history == []  # finished: nothing is trained again
    for a, b, c in zip(straight.parameters(), again.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
