"""vllm.grpc.engine.VllmEngine as routers speak it: its protos are those that the build fetched."""
import hashlib
import io
import json
import pathlib
import subprocess
import tempfile
import unittest
import zipfile

import grpc

import harness
from harness import PATIENCE, SOURCE, Server, eventually


def load_protos():
    folder = subprocess.run([SOURCE / "scripts/fetch_protos.sh", "--cached"], check=True, capture_output=True,
                            text=True).stdout.splitlines()[-1]
    modules = []
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(["protoc", "-I", folder, f"--python_out={out}", "common.proto", "vllm_engine.proto"], check=True)
        for stem in ("common", "vllm_engine"):
            path = pathlib.Path(out, stem + "_pb2.py")
            text = path.read_text().replace("import common_pb2 as common__pb2", "")
            namespace = {"__name__": "winnow_e2e_" + stem}
            exec(compile(text, str(path), "exec"), namespace)  # our own protoc's output
            modules.append(type("Messages", (), {k: v for k, v in namespace.items() if k[0] != "_"}))
    return modules


common, vllm = load_protos()


class VllmApi:
    STREAMS = {"Generate": (vllm.GenerateRequest, vllm.GenerateResponse),
               "GetTokenizer": (common.GetTokenizerRequest, common.GetTokenizerChunk),
               "SubscribeKvEvents": (common.SubscribeKvEventsRequest, common.KvEventBatch)}
    CALLS = {"Abort": vllm.AbortResponse, "HealthCheck": vllm.HealthCheckResponse, "Embed": vllm.EmbedResponse,
             "FlushCache": common.FlushCacheResponse, "StartProfile": common.ProfileResponse,
             "StopProfile": common.ProfileResponse, "GetModelInfo": vllm.GetModelInfoResponse,
             "GetServerInfo": vllm.GetServerInfoResponse, "GetLoads": vllm.GetLoadsResponse}

    def __init__(self, address, options=(("grpc.max_receive_message_length", 64 << 20),)):
        self.channel = grpc.insecure_channel(address, options)
        serialize = lambda message: message.SerializeToString()
        for name, (_, response) in self.STREAMS.items():
            setattr(self, name, self.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{name}", serialize,
                                                          response.FromString))
        for name, response in self.CALLS.items():
            setattr(self, name, self.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{name}", serialize,
                                                         response.FromString))


def request(ids, tokens, stream=False, name="", **sampling):
    sampling = {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": True, "max_tokens": tokens, **sampling}
    return vllm.GenerateRequest(request_id=name, tokenized=vllm.TokenizedInput(input_ids=ids), stream=stream,
                                sampling_params=vllm.SamplingParams(**sampling))


class Blocks:
    """What a router makes of the events: which blocks are in which tiers."""

    def __init__(self):
        self.tiers, self.tokens, self.parents = {}, {}, {}
        self.last = None

    def apply(self, batch):
        if batch.load.load_only:
            return
        assert self.last is None or batch.sequence_number == self.last + 1, (batch.sequence_number, self.last)
        self.last = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.tiers.clear()
            elif kind == "stored":
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert len(block.token_ids) == block.block_size
                    key = (block.block_hash, event.stored.tier)
                    assert key not in self.tiers, "stored twice"
                    self.tiers[key] = list(block.token_ids)
                    self.parents[block.block_hash] = parent
                    parent = block.block_hash
            else:
                for block_hash in event.removed.block_hashes:
                    del self.tiers[(block_hash, event.removed.tier)]

    def prefix_of(self, ids, block_size=64):
        """Tokens of the prompt that are known from the first one on."""
        known, parent = 0, None
        while True:
            found = [h for (h, _), tokens in self.tiers.items()
                     if tokens == ids[known:known + block_size] and self.parents[h] == parent]
            if not found or known + block_size >= len(ids):
                return known
            known, parent = known + block_size, found[0]


class VllmEngine(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--kv-events", "on", "--anonymous-prefixes", "shared", "--max-context", "4096", "--max-running", "8", "--max-streams", "64")
        cls.api = VllmApi(cls.server.address)
        cls.own = harness.Api(cls.server.address)
        cls.ids = list(cls.own.tokenize(harness.inference.TokenizeRequest(
            text=harness.inference.TextPrompt(text="The capital of the country is " * 30)), timeout=PATIENCE).ids)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def generate(self, *args, **kwargs):
        return list(self.api.Generate(request(*args, **kwargs), timeout=PATIENCE))

    def expected(self, ids, tokens, **fields):
        answer = list(self.own.generate(harness.inference.GenerateRequest(
            tokens=harness.inference.TokenPrompt(ids=ids), stopping=harness.inference.StoppingOptions(
                max_tokens=tokens, ignore_eos=True), **fields), timeout=PATIENCE))
        return harness.token_ids(answer), answer

    def test_not_streamed_is_one_message_for_each_choice(self):
        ids, answer = self.expected(self.ids, 24)
        responses = self.generate(self.ids, 24)
        self.assertEqual([r.WhichOneof("response") for r in responses], ["complete"])
        complete = responses[0].complete
        self.assertEqual(list(complete.output_ids), ids)
        self.assertEqual(complete.finish_reason, "length")
        self.assertEqual((complete.prompt_tokens, complete.completion_tokens), (len(self.ids), 24))
        self.assertGreater(complete.cached_tokens, 0)
        self.assertIsNone(complete.WhichOneof("matched_stop"))
        two = self.generate(self.ids, 5, n=2)
        self.assertEqual(sorted(r.complete.index for r in two), [0, 1])

    def test_streamed_chunks_are_what_is_new_and_then_it_is_complete(self):
        # More tokens than are kept for a reader, so that however late it reads they are several chunks.
        ids, _ = self.expected(self.ids, 700)
        responses = self.generate(self.ids, 700, stream=True)
        self.assertEqual({r.WhichOneof("response") for r in responses[:-1]}, {"chunk"})
        chunks = [r.chunk for r in responses[:-1]]
        self.assertGreater(len(chunks), 1)
        self.assertEqual([i for c in chunks for i in c.token_ids], ids)
        for chunk in chunks:
            self.assertEqual(chunk.completion_tokens, len(chunk.token_ids))
            self.assertEqual(chunk.prompt_tokens, len(self.ids))
        self.assertEqual(list(responses[-1].complete.output_ids), ids)

    def test_logprobs_are_the_same_numbers(self):
        _, answer = self.expected(self.ids, 6, top_logprobs=3)
        own = [token for message in answer for token in message.tokens]
        for stream in (False, True):
            parts = [r.chunk.output_logprobs if r.WhichOneof("response") == "chunk" else r.complete.output_logprobs
                     for r in self.generate(self.ids, 6, stream=stream, logprobs=3)]
            self.assertEqual([p for part in parts for p in part.token_logprobs], [t.logprob for t in own])
            self.assertEqual([list(t.token_ids) for part in parts for t in part.top_logprobs],
                             [[top.id for top in t.top] for t in own])

    def test_a_prompts_logprobs_are_the_same_numbers(self):
        _, answer = self.expected(self.ids, 3, prompt_logprobs=2)
        own = [token for message in answer for token in message.prompt_tokens]
        self.assertEqual([token.id for token in own], list(self.ids))
        first, second = sorted((r.complete for r in self.generate(self.ids, 3, prompt_logprobs=2, n=2)), key=lambda c: c.index)
        scores = first.input_logprobs
        self.assertEqual(list(scores.token_ids), list(self.ids))
        self.assertEqual([s.value if s.HasField("value") else None for s in scores.token_logprobs], [None, *(t.logprob for t in own[1:])])
        self.assertEqual([list(t.token_ids) for t in scores.top_logprobs], [[top.id for top in t.top] for t in own])
        self.assertEqual((first.cached_tokens, len(second.input_logprobs.token_ids), len(first.output_logprobs.token_ids)), (0, 0, 0))
        with self.assertRaises(grpc.RpcError) as raised:
            self.generate(self.ids, 3, prompt_logprobs=2, stream=True)
        self.assertIn("sampling_params.prompt_logprobs", raised.exception.details())

    def test_a_prompts_logprobs_are_as_many_as_a_client_takes_in_a_message(self):
        ids = (self.ids * 100)[:12484]
        with Server("--max-context", "13000") as server:
            # Its channel takes 4 MB, as every client does that says nothing else.
            api = VllmApi(server.address, options=())
            most, = api.Generate(request(ids[:-1], 1, prompt_logprobs=20), timeout=PATIENCE)
            scores = most.complete.input_logprobs
            self.assertEqual((len(scores.token_logprobs), {len(top.values) for top in scores.top_logprobs[1:]}), (12483, {20}))
            for count, prompt in ((20, ids), (21, self.ids)):
                with self.assertRaises(grpc.RpcError) as raised:
                    list(api.Generate(request(prompt, 1, prompt_logprobs=count), timeout=PATIENCE))
                self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                self.assertIn("sampling_params.prompt_logprobs", raised.exception.details())

    def test_text_and_stops(self):
        ids, _ = self.expected(self.ids, 24)
        stopped = self.generate(self.ids, 24, stop_token_ids=[ids[5]])[0].complete
        self.assertEqual(stopped.finish_reason, "stop")
        self.assertEqual(stopped.matched_token_id, ids[5])
        self.assertEqual(list(stopped.output_ids), ids[:ids.index(ids[5]) + 1])
        text = vllm.GenerateRequest(text="The capital of", sampling_params=vllm.SamplingParams(
            temperature=0.0, max_tokens=4, ignore_eos=True))
        self.assertEqual(len(list(self.api.Generate(text, timeout=PATIENCE))[0].complete.output_ids), 4)

    def test_constraints_hold(self):
        def answer(**constraint):
            got = list(self.api.Generate(vllm.GenerateRequest(
                tokenized=vllm.TokenizedInput(input_ids=self.ids[:20]),
                sampling_params=vllm.SamplingParams(temperature=1.0, seed=7, max_tokens=40, **constraint)), timeout=PATIENCE))
            ids = list(got[0].complete.output_ids)
            return self.own.detokenize(harness.inference.DetokenizeRequest(ids=ids), timeout=PATIENCE).text

        if not self.own.get_model(harness.inference.GetModelRequest(), timeout=PATIENCE).structured_output:
            with self.assertRaises(grpc.RpcError) as raised:
                answer(regex="a")
            self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            return
        self.assertIn(answer(choice=vllm.ChoiceConstraint(choices=["north", "south"])), ["north", "south"])
        self.assertRegex(answer(regex="[0-9]{3}-[0-9]{2}"), "^[0-9]{3}-[0-9]{2}$")
        said = json.loads(answer(json_schema=json.dumps({
            "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False})))
        self.assertIsInstance(said["ok"], bool)
        self.assertIn(answer(grammar='root ::= "yes" | "no"'), ["yes", "no"])

    def test_what_cannot_be_done_is_named(self):
        sampling = vllm.SamplingParams
        for field, change in {
                "sampling_params": {"sampling_params": sampling(regex="(")},
                "sampling_params.prompt_logprobs": {"sampling_params": sampling(prompt_logprobs=-1)},
                "sampling_params.truncate_prompt_tokens": {"sampling_params": sampling(truncate_prompt_tokens=-1)},
                "sampling_params.logprobs": {"sampling_params": sampling(logprobs=-1)},
                "sampling_params.temperature": {"sampling_params": sampling(temperature=-2.0)},
                "sampling_params.max_tokens": {"sampling_params": sampling(max_tokens=5000)},
                "sampling_params.stop[0]": {"sampling_params": sampling(stop=["x" * 300])},
                "tokenized.input_ids[1]": {"tokenized": vllm.TokenizedInput(input_ids=[5, 1 << 31])},
                "mm_inputs": {"mm_inputs": vllm.MultimodalInputs()},
                "media_refs": {"media_refs": vllm.MediaRefs()},
                "kv_transfer_params": {"kv_transfer_params": vllm.KvTransferParams()},
                "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
                "data_parallel_rank": {"data_parallel_rank": 1},
                "request_id": {"request_id": "a\nb"}}.items():
            with self.subTest(field):
                bad = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5, 6]))
                bad.MergeFrom(vllm.GenerateRequest(**change)) if "tokenized" not in change else bad.CopyFrom(
                    vllm.GenerateRequest(**change))
                with self.assertRaises(grpc.RpcError) as raised:
                    list(self.api.Generate(bad, timeout=PATIENCE))
                self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                fields = [v.field for v in harness.details_of(raised.exception)["BadRequest"].field_violations]
                self.assertIn(field, fields)
        with self.assertRaises(grpc.RpcError) as raised:
            list(self.api.Generate(vllm.GenerateRequest(), timeout=PATIENCE))
        self.assertIn("input", raised.exception.details())
        for name, message in (("Embed", vllm.EmbedRequest()), ("FlushCache", common.FlushCacheRequest()),
                              ("StartProfile", common.StartProfileRequest()),
                              ("StopProfile", common.StopProfileRequest())):
            with self.subTest(name):
                with self.assertRaises(grpc.RpcError) as raised:
                    getattr(self.api, name)(message, timeout=PATIENCE)
                self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
                self.assertIn(name, raised.exception.details())

    def test_abort_ends_a_tenants_own_call(self):
        mine, theirs = (("x-winnow-tenant", "mine"),), (("x-winnow-tenant", "theirs"),)
        # With log-probabilities it is too much to end before it is read.
        call = self.api.Generate(request(self.ids, 3000, stream=True, name="long", logprobs=20), timeout=PATIENCE, metadata=mine)
        next(call)
        abort = vllm.AbortRequest(request_ids=["long", "no such call"])
        self.api.Abort(abort, timeout=PATIENCE, metadata=theirs)
        next(call)
        self.api.Abort(abort, timeout=PATIENCE, metadata=mine)
        with self.assertRaises(grpc.RpcError) as raised:
            for _ in call:
                pass
        self.assertEqual(raised.exception.code(), grpc.StatusCode.CANCELLED)
        eventually(lambda: self.server.metric("winnow_requests_running") == 0, "the call gives its blocks back")
        self.api.Abort(abort, timeout=PATIENCE, metadata=mine)  # it is over: no error
        log = [e for e in self.server.events() if e["event"] == "request" and e.get("client_id") == "long"]
        self.assertEqual(len(log), 1)

    def test_what_routers_ask_first(self):
        self.assertTrue(self.api.HealthCheck(vllm.HealthCheckRequest(), timeout=PATIENCE).healthy)
        model = self.own.get_model(harness.inference.GetModelRequest(), timeout=PATIENCE)
        info = self.api.GetModelInfo(vllm.GetModelInfoRequest(), timeout=PATIENCE)
        self.assertEqual((info.served_model_name, info.max_context_length, info.vocab_size),
                         (model.name, model.max_context, model.vocab_size))
        self.assertEqual(list(info.eos_token_ids), list(model.eos_token_ids))
        self.assertTrue(info.is_generation)
        server = self.api.GetServerInfo(vllm.GetServerInfoRequest(), timeout=PATIENCE)
        self.assertEqual((server.block_size, server.max_num_seqs, server.data_parallel_size), (64, 8, 1))
        self.assertGreater(server.uptime_seconds, 0)
        loads = self.api.GetLoads(vllm.GetLoadsRequest(), timeout=PATIENCE)
        self.assertEqual(len(loads.loads), 1)
        self.assertEqual(loads.loads[0].max_total_num_tokens % 64, 0)
        self.assertEqual(len(self.api.GetLoads(vllm.GetLoadsRequest(dp_rank=3), timeout=PATIENCE).loads), 0)
        call = self.api.Generate(request(self.ids, 3000, stream=True, logprobs=20), timeout=PATIENCE)
        next(call)
        busy = self.api.GetLoads(vllm.GetLoadsRequest(), timeout=PATIENCE).loads[0]
        self.assertGreaterEqual(busy.num_running_reqs, 1)
        self.assertGreater(busy.token_usage, 0)
        call.cancel()

    def test_the_tokenizer_is_the_models_own(self):
        chunks = list(self.api.GetTokenizer(common.GetTokenizerRequest(), timeout=PATIENCE))
        data = b"".join(chunk.data for chunk in chunks)
        self.assertEqual(chunks[-1].sha256, hashlib.sha256(data).hexdigest())
        self.assertTrue(all(chunk.sha256 == "" for chunk in chunks[:-1]))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self.assertIsNone(archive.testzip())
            self.assertIn("tokenizer.json", archive.namelist())
            for name in archive.namelist():
                self.assertEqual(archive.read(name), pathlib.Path(harness.MODEL, name).read_bytes())

    def test_events_say_what_the_next_prompt_will_find(self):
        metadata = (("x-winnow-tenant", "events"),)
        blocks, seen = Blocks(), []
        stream = self.api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE, metadata=metadata)
        first = next(stream)
        self.assertEqual((first.snapshot.index, first.snapshot.count, first.snapshot.blocks), (0, 1, 0))
        blocks.apply(first)
        ids = [5 + i % 97 for i in range(500)]
        self.assertEqual(blocks.prefix_of(ids), 0)
        list(self.api.Generate(request(ids, 4), timeout=PATIENCE, metadata=metadata))
        while blocks.prefix_of(ids) < 448:
            seen.append(next(stream))
            blocks.apply(seen[-1])
        again = list(self.api.Generate(request(ids, 4), timeout=PATIENCE, metadata=metadata))[0].complete
        self.assertEqual(again.cached_tokens, 448)
        self.assertGreater(max(batch.load.sample for batch in seen), 0)
        # Load comes by itself, too.
        while not next(stream).load.load_only:
            pass
        stream.cancel()

        # From a snapshot and from the middle of the stream it is the same.
        late, resumed = Blocks(), Blocks()
        stream = self.api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE, metadata=metadata)
        late.apply(next(stream))
        stream.cancel()
        self.assertEqual(late.tiers, blocks.tiers)
        resumed.apply(first)
        resumed.last = None
        stream = self.api.SubscribeKvEvents(common.SubscribeKvEventsRequest(
            start_sequence_number=first.sequence_number + 1), timeout=PATIENCE, metadata=metadata)
        while resumed.prefix_of(ids) < 448:
            resumed.apply(next(stream))
        stream.cancel()
        self.assertEqual(resumed.tiers, blocks.tiers)

        # Another tenant's prompts are nobody's business.
        stream = self.api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE,
                                            metadata=(("x-winnow-tenant", "other"),))
        self.assertEqual(next(stream).snapshot.blocks, 0)
        stream.cancel()
        # Numbers that nobody gave.
        with self.assertRaises(grpc.RpcError) as raised:
            next(self.api.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=1 << 40),
                                            timeout=PATIENCE))
        self.assertEqual(raised.exception.code(), grpc.StatusCode.OUT_OF_RANGE)


class Anonymous(unittest.TestCase):
    """Clients of a router that sends no tenant share nothing, and the router hears of nothing that it could not use."""

    def test_without_being_told_so_nothing_is_shared(self):
        ids = [5 + i % 97 for i in range(500)]
        for flags in (("--kv-events", "on"), ("--kv-events", "off")):
            with Server(*flags, "--max-context", "2048") as server:
                api = VllmApi(server.address)
                named = (("x-winnow-tenant", "named"),)
                ask = lambda metadata=(): list(api.Generate(request(ids, 4), timeout=PATIENCE, metadata=metadata))[0].complete
                first = ask()
                self.assertEqual([ask().cached_tokens for _ in range(3)], [0, 0, 0], flags)
                self.assertEqual(ask().output_ids, first.output_ids)
                self.assertEqual(ask(named).cached_tokens, 0)
                self.assertEqual(ask(named).cached_tokens, 448)
                if "on" in flags:
                    stream = api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE)
                    self.assertEqual(next(stream).snapshot.blocks, 0)
                    stream.cancel()


class Others(unittest.TestCase):
    def test_tiers_and_the_end(self):
        """A pool that is full and a disk: what memory forgets the disk still has, and events say so."""
        with harness.temporary_directory() as store, Server(
                "--kv-events", "on", "--anonymous-prefixes", "shared", "--max-context", "2048", "--kv-bytes", "12MiB", "--disk-bytes", "256MiB", "--max-running", "4", "--step-tokens", "128",
                "--store-dir", store) as server:
            api = VllmApi(server.address)
            blocks = Blocks()
            stream = api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE)
            blocks.apply(next(stream))
            prompts = [[5 + (i * (k + 3)) % 97 for i in range(1500)] for k in range(4)]
            for ids in prompts:
                list(api.Generate(request(ids, 2), timeout=PATIENCE))
            disk = lambda: [h for h, tier in blocks.tiers if tier == common.KV_CACHE_TIER_DISK]
            while len(disk()) < 4 * 23:
                blocks.apply(next(stream))
            for ids in prompts:
                self.assertEqual(blocks.prefix_of(ids), 1472)
            server.signal(15)
            with self.assertRaises((grpc.RpcError, StopIteration)):
                while True:
                    blocks.apply(next(stream))
            self.assertEqual(blocks.tiers, {})  # the server said that it has nothing any more
            self.assertEqual(server.wait(), 0)

    def test_off_is_unimplemented(self):
        with Server("--max-context", "512") as server:
            api = VllmApi(server.address)
            with self.assertRaises(grpc.RpcError) as raised:
                next(api.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE))
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            self.assertIn("--kv-events", raised.exception.details())
            server.signal(15)
            server.wait()


if __name__ == "__main__":
    harness.main()
