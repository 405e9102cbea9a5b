"""Feature maps on keys as real models have them: far from the origin, so that mid lies far below the sink."""

import math

import pytest
import torch
from safetensors.torch import save_file

from calibrate.artifact import Artifact, Features
from calibrate.capture import CaptureSettings, _Recorder, load_shard
from calibrate.encoders import clip_gradients
from calibrate.evaluate import Validation, passes_of
from calibrate.features import FeatureMaps, losses
from calibrate.policies import Policy
from calibrate.region import Region
from calibrate.training import Corpus, FeatureSettings, train_features
from calibrate.verdict import judge

KV_HEADS, GROUP, DIM, LENGTH = 3, 2, 32, 900
LAYERS, REGION = (2, 3), Region(4, 48)
HEADS = KV_HEADS * len(LAYERS)


class FarKeys:
    """Heads whose keys are a mean, of norm 12 to 20 and most of it in two channels, and topics about it. Queries look away
    from the mean, by more or by less, and towards a topic. Values follow the topics."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        far = torch.rand(HEADS, DIM, generator=generator).topk(2, -1).indices
        self._mean = normal(HEADS, DIM)
        self._mean.scatter_add_(1, far, self._mean.gather(1, far).sign() * (8.0 + 4.0 * torch.rand(HEADS, 2, generator=generator)))
        self._topics, self._meanings = normal(HEADS, 12, DIM) * 2.0, normal(HEADS, 12, DIM)

    def save(self, path) -> None:
        normal = lambda *shape: torch.randn(*shape, generator=self._generator)
        recorder = _Recorder(CaptureSettings(layers=LAYERS, sink=REGION.sink, window=REGION.window), GROUP)
        recorder.keep_kv, recorder.rows = True, torch.arange(300, LENGTH, 7)
        for i, layer in enumerate(LAYERS):
            heads = slice(i * KV_HEADS, (i + 1) * KV_HEADS)
            mean, topics, meanings = self._mean[heads], self._topics[heads], self._meanings[heads]
            topic = torch.randint(12, (KV_HEADS, LENGTH), generator=self._generator)
            of_topic = lambda x: x.gather(1, topic.unsqueeze(-1).expand(-1, -1, DIM))
            k = mean.unsqueeze(1) + of_topic(topics) + normal(KV_HEADS, LENGTH, DIM)
            v = of_topic(meanings) + 0.3 * normal(KV_HEADS, LENGTH, DIM)
            k[:, :REGION.sink] *= 0.02  # the sink's keys are near the origin: logits near 0
            away = 4.0 + 16.0 * torch.rand(KV_HEADS, GROUP, LENGTH, 1, generator=self._generator)
            direction = (mean / mean.pow(2).sum(-1, keepdim=True)).view(KV_HEADS, 1, 1, DIM)
            wish = topics[:, torch.randint(12, (GROUP * LENGTH,), generator=self._generator)].view(KV_HEADS, GROUP, LENGTH, DIM)
            q = (0.25 * wish - away * direction * math.sqrt(DIM)) + 0.5 * normal(KV_HEADS, GROUP, LENGTH, DIM)
            recorder(layer, q.flatten(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 1.0 / math.sqrt(DIM))
        tensors = {name: torch.cat(parts, 1).contiguous() for name, parts in recorder.tensors.items()}
        tensors["positions"] = recorder.rows.to(torch.int32)
        tensors["answers"] = torch.zeros(len(recorder.rows), dtype=torch.uint8)
        save_file(tensors, path, metadata={"kind": "text", "length": str(LENGTH)})


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """(corpus, paths of validation documents)"""
    directory, keys = tmp_path_factory.mktemp("far"), FarKeys(torch.Generator().manual_seed(11))
    paths = [directory / f"{i}.safetensors" for i in range(5)]
    for path in paths:
        keys.save(path)
    return Corpus(paths[:3], LAYERS, GROUP, DIM, REGION, "cpu"), paths[3:]


def validation(corpus: Corpus, paths, passes) -> Validation:
    return Validation(paths, passes, KV_HEADS, GROUP, REGION, corpus.scaling, "cpu")


def artifact_of(maps: FeatureMaps) -> Artifact:
    features = Features(maps.features)
    folded = {"key": maps.key.folded(), "query": maps.query.folded()}
    for i, layer in enumerate(LAYERS):
        heads = slice(i * KV_HEADS, (i + 1) * KV_HEADS)
        features.layers[layer] = {side: {role: (w[heads], b[heads]) for role, (w, b) in roles.items()}
                                  for side, roles in folded.items()}
    shape = {"layers": 4, "query_heads": KV_HEADS * GROUP, "kv_heads": KV_HEADS, "head_dim": DIM}
    return Artifact("0" * 64, shape, 2, features=features)


def test_the_keys_are_those_that_are_hard(far):
    """Mid tokens lie 4 to 20 below the sink, by another amount for every query, and yet have a share of the mass."""
    corpus, _ = far
    for shard in corpus.shards:
        logits = torch.einsum("ngmd,nld->ngml", shard.q.float(), shard.k.float()) * corpus.scaling
        mid = REGION.mid_mask(shard.positions, LENGTH)
        means = (logits * mid).sum(-1) / mid.sum(-1)
        assert -14.0 < means.mean() < -8.0 and means.std(-1).min() > 3.0
        assert logits[..., :REGION.sink].abs().max() < 2.0
        rest = (torch.exp(logits - shard.lse.unsqueeze(-1)) * mid).sum(-1)
        assert 0.02 < rest.mean() < 0.98


def test_maps_on_keys_far_from_the_origin_complete_at_every_head(far):
    corpus, paths = far
    maps, history = train_features(corpus, FeatureSettings(features=16, inner=16, steps=60, queries=16), "t")
    assert history[-1] < history[0] and max(history) < 10.0
    artifact = artifact_of(maps)
    documents = validation(corpus, paths, [LAYERS])
    assert judge(artifact, documents) == [True] * HEADS
    pair = [Policy("oracle", share=0.02), Policy("oracle", share=0.02, completion=True)]
    without, completed = documents.measure(pair, artifact).values()
    ratio = completed["error"].mean(0) / without["error"].mean(0)
    assert ratio.max() < 0.9


def test_layers_measured_in_passes_have_the_figures_of_all_at_once(far):
    corpus, paths = far
    artifact = artifact_of(FeatureMaps(*corpus.mid_sample(), 16, 16, seed=1))
    artifact.features.helps = [True, False, True, True, True, False]
    policies = [Policy("oracle", share=0.02, completion=True), Policy("quest", share=0.05)]
    assert passes_of(LAYERS, KV_HEADS, KV_HEADS) == passes_of(LAYERS, 1, KV_HEADS) == [(2,), (3,)]
    assert passes_of((2, 3, 5), 8, KV_HEADS) == [(2, 3), (5,)]
    whole, parts = (validation(corpus, paths, passes).measure(policies, artifact) for passes in ([LAYERS], [(2,), (3,)]))
    assert list(whole) == policies
    for policy, figures in whole.items():
        for key, x in figures.items():
            assert x.shape == (2, HEADS) and torch.allclose(parts[policy][key], x, rtol=1e-4, atol=1e-6)


def test_maps_start_with_the_mass_of_the_sample(far):
    corpus, paths = far
    shard = load_shard(paths[0], LAYERS, GROUP)
    maps = FeatureMaps(*corpus.mid_sample(), 16, 16, seed=1)
    rows = torch.arange(0, len(shard.positions), 3)
    output, _, mass = losses(maps, shard, rows, 0.02, REGION, corpus.scaling, 0.0)
    assert mass.max() < 3.0 and output.max() < 100.0


def test_mass_that_is_too_large_by_any_factor_has_a_gradient(far):
    """e^100 times too much: the exponent that the output is computed with is cut off far below."""
    corpus, paths = far
    shard = load_shard(paths[0], LAYERS, GROUP)
    maps = FeatureMaps(*corpus.mid_sample(), 16, 16, seed=1)
    with torch.no_grad():
        maps.query.biases["out"].add_(100.0)
    _, _, mass = losses(maps, shard, torch.arange(8), 0.02, REGION, corpus.scaling, 0.0)
    assert 150.0 < mass.min()
    mass.sum().backward()
    slope = maps.query.biases["out"].grad.sum(1)
    assert torch.allclose(slope, torch.full_like(slope, 2.0), atol=0.05)


def test_a_gradient_is_clipped_for_each_head_alone(far):
    corpus, _ = far
    maps = FeatureMaps(*corpus.mid_sample(), 16, 16, seed=1)
    generator = torch.Generator().manual_seed(2)
    for p in maps.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
        p.grad[1] *= 1e9
    before = [p.grad.clone() for p in maps.parameters()]
    clip_gradients(maps, HEADS, 1.0)
    total = sum(p.grad[1].pow(2).sum() for p in maps.parameters()).sqrt()
    assert torch.allclose(total, torch.ones(()), rtol=1e-4)
    others = [i for i in range(HEADS) if i != 1]
    for old, p in zip(before, maps.parameters(), strict=True):
        assert torch.equal(p.grad[others], old[others])


def test_too_few_keys_for_the_features_are_named(far):
    corpus, _ = far
    keys, queries = corpus.mid_sample()
    with pytest.raises(ValueError, match="10 sampled keys are fewer than 16 features"):
        FeatureMaps(keys[:, :10], queries, 16, 16, seed=1)
