"""What the dashboards show: rows of panels. generate.py makes Grafana's JSON of it.

A query has no selector: `@` after a metric's name stands for the dashboard's selection, and $__rate_interval for Grafana's
window. `limit` names the alert whose threshold is drawn.
"""
from dataclasses import dataclass, field


@dataclass
class Panel:
    title: str
    description: str
    unit: str  # Grafana's name of it
    queries: list  # of (legend, PromQL)
    kind: str = "timeseries"
    width: int = 8  # of 24
    limit: str = ""
    maximum: float = None
    stack: bool = False
    mappings: dict = field(default_factory=dict)  # value -> text, for stat


def rate(metric, by="instance", labels=""):
    return f"sum by ({by}) (rate({metric}@{labels}[$__rate_interval]))"


def ratio(above, below):
    return f"{above} / ({below} > 0)"


def quantiles(metric, *which):
    return [(f"p{q * 100:g} {{{{instance}}}}",
             f"histogram_quantile({q}, sum by (instance, le) (rate({metric}_bucket@[$__rate_interval])))") for q in which]


def mean(metric):
    return ratio(rate(metric + "_sum"), rate(metric + "_count"))


INSTANCE = "{{instance}}"

OVERVIEW = {
    "Does it serve?": [
        Panel("Replicas that serve", "Replicas whose health service says SERVING. Fewer than are deployed: look at those that are missing, "
              "then at docs/runbooks/WinnowNotServing.md.", "short", [("serving", "sum(winnow_serving@)"), ("there", "count(winnow_serving@)")], "stat", 4),
        Panel("Version and model", "What runs, for each replica. Two versions for long: a roll-out is stuck.", "short",
              [("{{instance}}: {{version}} {{model}} {{backend}}", "winnow_build_info@")], "stat", 8),
        Panel("Requests", "Requests that ended, by outcome. error and unavailable are the server's fault, rejected is load, the others are the "
              "clients'.", "reqps", [("{{outcome}}", rate("winnow_requests_total", "outcome"))], stack=True, width=12),
        Panel("Failed by the server", "Share of requests that ended with error or unavailable.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_requests_total", labels='outcome=~"error|unavailable"'), rate("winnow_requests_total")))], limit="WinnowErrors"),
        Panel("Refused for want of room", "Share of requests that a full queue refused. Add replicas.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_requests_total", labels='outcome="rejected"'), rate("winnow_requests_total")))], limit="WinnowRejecting"),
        Panel("Age of the step loop", "Since each engine last began a step; idle ones beat, too. High: the engine hangs in a step.", "s",
              [(INSTANCE, "winnow_engine_heartbeat_age_seconds@")], limit="WinnowEngineStuck"),
    ],
    "How much does it do?": [
        Panel("Tokens generated", "Throughput that clients see.", "short", [(INSTANCE, rate("winnow_generated_tokens_total"))], stack=True),
        Panel("Tokens computed", "Tokens through the model: prompts, answers, and again after preemption. The rest of the prompts came from a cache.",
              "short", [(INSTANCE, rate("winnow_computed_tokens_total"))], stack=True),
        Panel("Tokens of a step", "Mean tokens that a step computes. Near 1 under load: batches do not form.", "short",
              [(INSTANCE, mean("winnow_step_tokens"))]),
    ],
    "How long do clients wait?": [
        Panel("First token", "From arrival to the first token. Long beside a short queue: prompts are long and not cached.", "s",
              quantiles("winnow_time_to_first_token_seconds", .5, .95), limit="WinnowFirstTokenSlow"),
        Panel("Between tokens", "How fluent answers are. Long tails: long prompts beside them, or waits for a disk.", "s",
              quantiles("winnow_inter_token_seconds", .5, .95, .99), limit="WinnowTokensSlow"),
        Panel("In the queue", "From arrival until the engine first worked on a request.", "s", quantiles("winnow_queue_seconds", .5, .95),
              limit="WinnowQueueSlow"),
        Panel("Whole answers", "From arrival to the end, of answers that were finished.", "s", quantiles("winnow_request_duration_seconds", .5, .95)),
        Panel("One step", "Duration of an engine step: bounds the time between tokens from below.", "s", quantiles("winnow_step_seconds", .5, .99)),
        Panel("How sequences end", "By reason. error and deadline are worth a look.", "short",
              [("{{reason}}", rate("winnow_sequences_finished_total", "reason"))], stack=True),
    ],
    "Answers that keep a form": [
        Panel("Forms asked for", "Valid requests with a schema, an expression or a grammar, by kind; structural_tag has calls of functions, too.", "reqps",
              [("{{kind}}", rate("winnow_structured_requests_total", "kind"))], stack=True, width=12),
        Panel("Compiling a form", "Before the request queues. Long tails: clients send large or ever new schemas, and each is compiled once.", "s",
              quantiles("winnow_structured_compile_seconds", .5, .95), width=12),
    ],
    "Is there room?": [
        Panel("Running, waiting, paused", "Sequences. Waiting for long: more comes in than is computed. Paused: their readers are slow.", "short",
              [("running " + INSTANCE, "winnow_requests_running@"), ("waiting " + INSTANCE, "winnow_requests_waiting@"),
               ("paused " + INSTANCE, "winnow_requests_paused@"), ("preempted " + INSTANCE, "winnow_requests_preempted@")]),
        Panel("Prompt tokens that wait", "Over the tokens computed a second it is how long the queue takes.", "short",
              [(INSTANCE, "winnow_waiting_tokens@")]),
        Panel("KV in use", "Share of the KV blocks that sequences use. Blocks that are kept for prefixes count as free.", "percentunit",
              [(INSTANCE, "winnow_kv_blocks_used@ / (winnow_kv_blocks_capacity@ > 0)")], limit="WinnowKvFull", maximum=1),
        Panel("KV kept for prefixes", "Share of the KV blocks that no sequence uses and that hold prefixes.", "percentunit",
              [(INSTANCE, "winnow_kv_blocks_idle@ / (winnow_kv_blocks_capacity@ > 0)")], maximum=1),
        Panel("Preemptions", "Sequences that lost their KV to others, a second: work that is done twice.", "short",
              [(INSTANCE, rate("winnow_preemptions_total"))], limit="WinnowPreempting"),
        Panel("Prompt tokens from a cache", "Share of prompt tokens that were not computed. Low beside similar prompts: look at what changes at "
              "their head, or at the router.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_cached_tokens_total"), rate("winnow_prompt_tokens_total")))], maximum=1),
    ],
    "The process": [
        Panel("Memory", "Resident. Mapped files of a GGUF model count.", "bytes", [(INSTANCE, "process_resident_memory_bytes@")]),
        Panel("Processors", "Processor seconds a second.", "short", [(INSTANCE, rate("process_cpu_seconds_total"))]),
        Panel("Connections and descriptors", "HTTP and gRPC connections, and open descriptors. Near the limit: new connections are refused.", "short",
              [("HTTP " + INSTANCE, "winnow_http_connections@"), ("gRPC " + INSTANCE, "winnow_grpc_connections@"),
               ("descriptors " + INSTANCE, "process_open_fds@")]),
        Panel("HTTP trouble", "Connections that were refused, evicted, too slow, or could not be taken; log lines that were dropped.", "short",
              [("refused", rate("winnow_http_connections_refused_total")), ("evicted", rate("winnow_http_connections_evicted_total")),
               ("too slow", rate("winnow_http_timeouts_total")), ("not taken", rate("winnow_http_accept_errors_total")),
               ("log lines dropped", rate("winnow_log_dropped_lines_total"))]),
        Panel("gRPC trouble", "Connections that were closed for what they sent, times that one had to wait because of resets or small frames, and KV "
              "events that no reader of ZMQ got.", "short",
              [("closed", rate("winnow_grpc_connections_broken_total")), ("made to wait", rate("winnow_grpc_delays_total")),
               ("KV event batches missed", rate("winnow_kv_event_batches_missed_total"))]),
        Panel("Certificate", "Until the first certificate expires; empty without TLS.", "s",
              [(INSTANCE, "(winnow_tls_certificate_expiry_timestamp_seconds@ > 0) - time()")], "stat", limit="WinnowCertificateExpires"),
        Panel("Draining or failed", "1 while a replica goes, or after its model failed.", "short",
              [("draining " + INSTANCE, "winnow_engine_draining@"), ("failed " + INSTANCE, "winnow_engine_failed@")], limit="WinnowEngineFailed"),
    ],
}

READS = {
    "What attention reads": [
        Panel("Bytes by tier", "KV bytes that decoding read from fast memory, and that were brought from host memory and disk for it.", "Bps",
              [("{{tier}}", rate("winnow_kv_read_bytes_total", "tier"))]),
        Panel("Share of dense", "What was read over what dense attention would have read. 1: requests are dense or short.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_kv_read_bytes_total", labels='tier="fast"'), rate("winnow_kv_dense_bytes_total")))], maximum=1),
        Panel("Candidates chosen", "Share of the KV entries that policies could choose from.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_retrieval_selected_rows_total"), rate("winnow_retrieval_candidate_rows_total")))]),
        Panel("KV entries of a step", "Attended in one step that decoded, over all layers and heads.", "short",
              quantiles("winnow_step_attended_rows", .5, .95)),
        Panel("Share kept by a sequence", "Distribution over sequences of chosen candidates.", "percentunit",
              quantiles("winnow_retrieval_kept_ratio", .5, .95)),
        Panel("KV entries", "A second, while decoding: attended, and by tier read for it, with those of whole blocks.", "short",
              [("{{tier}}", rate("winnow_kv_read_rows_total", "tier")), ("attended", rate("winnow_kv_attended_rows_total"))]),
        Panel("Kernels asked for", "A second, of a GPU: one by one, or within CUDA graphs. Many alone while only decoding: steps pay for launches.", "short",
              [("{{how}}", rate("winnow_device_launches_total", "how"))], stack=True),
    ],
    "How good the choice is": [
        Panel("Coverage", "Share of the attention's mass on what was read, of sampled choices. Below 0.9 answers begin to differ from dense ones.",
              "percentunit", [(INSTANCE, mean("winnow_retrieval_coverage_ratio"))], limit="WinnowCoverageLow", maximum=1),
        Panel("Overlap with the best set", "Intersection over union with the best set of the same size.", "percentunit",
              [(INSTANCE, mean("winnow_retrieval_iou_ratio"))], maximum=1),
        Panel("Stood for by the tail estimate", "Share of the mass that was not read and was estimated.", "percentunit",
              [(INSTANCE, mean("winnow_retrieval_tail_mass_ratio"))], maximum=1),
        Panel("Tokens below a floor", "Tokens that read more, or everything, because a measure fell below their policy's floor.", "short",
              [("read more " + INSTANCE, rate("winnow_retrieval_widened_tokens_total")),
               ("dense " + INSTANCE, rate("winnow_retrieval_floor_dense_tokens_total"))]),
        Panel("Indexes", "Bytes beside the KV pool.", "bytes", [("{{index}} {{instance}}", "winnow_index_bytes@")]),
        Panel("Retrieval begins at", "Shortest context that retrieves, where the policy does not say. Huge: retrieval never won here.", "short",
              [(INSTANCE, "winnow_retrieval_from_tokens@")], "stat"),
    ],
    "Drafts of policies with verify": [
        Panel("Drafted, verified, accepted", "Tokens a second. Drafted and not verified: the answer ended, or its draft was dropped.", "short",
              [("drafted " + INSTANCE, rate("winnow_draft_tokens_total")), ("verified " + INSTANCE, rate("winnow_draft_verified_tokens_total")),
               ("accepted " + INSTANCE, rate("winnow_draft_accepted_tokens_total"))]),
        Panel("Accepted of a pass", "Drafted tokens that became part of an answer, of each pass of dense attention, which adds one of its own.", "short",
              [(INSTANCE, ratio(rate("winnow_draft_accepted_tokens_total"), rate("winnow_draft_verifications_total")))]),
        Panel("Accepted by place", "Share of the tokens at a place in their draft. Where it falls low, drafts are too long.", "percentunit",
              [("{{place}}", ratio(rate("winnow_draft_accepted_at_total", "place"), rate("winnow_draft_verified_at_total", "place")))], maximum=1),
        Panel("KV read by drafts and verifications", "By tier. A verification reads everything once for all tokens of a draft.", "Bps",
              [("draft {{tier}}", rate("winnow_draft_read_bytes_total", "tier")), ("verify {{tier}}", rate("winnow_verify_read_bytes_total", "tier"))]),
    ],
    "Slower tiers": [
        Panel("Row cache hits", "KV entries of slower tiers that were still at hand. Low: raise --row-cache-bytes.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_kv_row_cache_hits_total"), "(" + rate("winnow_kv_row_cache_hits_total") + " + " +
                                rate("winnow_kv_row_cache_misses_total") + ")"))], maximum=1),
        Panel("Prefetch", "Entries read ahead that were chosen then, over those that were read ahead.", "percentunit",
              [(INSTANCE, ratio(rate("winnow_kv_prefetch_hits_total"), rate("winnow_kv_prefetch_rows_total")))], maximum=1),
        Panel("Steps wait", "Share of time in which steps waited for slower tiers.", "percentunit",
              [(INSTANCE, rate("winnow_kv_tier_wait_seconds_total"))], maximum=1),
        Panel("Disk reads", "From asking until the bytes are checked.", "s",
              quantiles("winnow_kv_read_seconds", .5, .99), limit="WinnowDiskSlow"),
        Panel("In flight", "Reads and writes that the disk has not answered.", "short", [(INSTANCE, "winnow_store_queue_depth@")]),
        Panel("Read amplification", "Bytes from the medium over bytes that readers got: pages are read whole.", "short",
              [(INSTANCE, ratio(rate("winnow_store_device_read_bytes_total"), rate("winnow_store_payload_read_bytes_total")))]),
        Panel("Medium", "Bytes read from and written to the medium.", "Bps",
              [("read " + INSTANCE, rate("winnow_store_device_read_bytes_total")),
               ("written " + INSTANCE, rate("winnow_store_device_written_bytes_total"))]),
        Panel("Layer blocks moved", "Written to slower tiers, read back whole, and not taken.", "short",
              [("saved " + INSTANCE, rate("winnow_kv_layer_blocks_saved_total")), ("loaded " + INSTANCE, rate("winnow_kv_layer_blocks_loaded_total")),
               ("not taken " + INSTANCE, rate("winnow_kv_save_failures_total"))]),
        Panel("Resume", "Mean time in which the step loop takes over a found prefix.", "s", [(INSTANCE, mean("winnow_resume_seconds"))]),
        Panel("Resume reads", "Bytes of slower tiers that taking over prefixes read.", "Bps", [(INSTANCE, rate("winnow_resume_bytes_total"))]),
        Panel("Fetches", "Of whole layer blocks between steps: open now; and begun, given up, waiting for room, and sequences that rest, a second.", "short",
              [("open " + INSTANCE, "winnow_kv_fetches_open@"), ("begun/s " + INSTANCE, rate("winnow_kv_fetches_total")),
               ("given up/s " + INSTANCE, rate("winnow_kv_fetches_given_up_total")),
               ("room/s " + INSTANCE, rate("winnow_kv_fetch_room_waits_total")), ("rests/s " + INSTANCE, rate("winnow_kv_fetch_rests_total"))]),
        Panel("Read back whole", "Bytes of layer blocks: dense attention, and eager resume.", "Bps", [(INSTANCE, rate("winnow_kv_loaded_bytes_total"))]),
    ],
    "The store": [
        Panel("State", "0 works (or there is none), 1 reads only, 2 off.", "short", [(INSTANCE, "winnow_store_state@")], limit="WinnowStoreDegraded"),
        Panel("Read by", "How files are read. threads where uring was expected: the container forbids io_uring.", "short",
              [("{{instance}}: {{io}}", "winnow_store_info@")], "stat"),
        Panel("Bytes", "Used, and allowed. A full store is its normal state: it evicts.", "bytes",
              [("used " + INSTANCE, "winnow_store_used_bytes@"), ("allowed " + INSTANCE, "winnow_store_capacity_bytes@")]),
        Panel("Prefixes found", "Prompt tokens whose KV was found, by where.", "short", [("{{from}}", rate("winnow_prefix_hit_tokens_total", "from"))], stack=True),
        Panel("Entries", "And those that made room for others, or that a tenant's quota kept out, a second.", "short",
              [("entries " + INSTANCE, "winnow_store_blocks@"), ("evicted/s " + INSTANCE, rate("winnow_store_evicted_blocks_total")),
               ("over quota/s " + INSTANCE, rate("winnow_store_quota_refused_blocks_total"))]),
        Panel("Trouble", "Damaged entries, failed input and output, and KV that was lost and computed again, in the window.", "short",
              [("damaged " + INSTANCE, "increase(winnow_store_corrupt_blocks_total@[$__rate_interval])"),
               ("failed " + INSTANCE, "increase(winnow_store_io_errors_total@[$__rate_interval])"),
               ("lost KV " + INSTANCE, "increase(winnow_kv_losses_total@[$__rate_interval])")], limit="WinnowStoreCorrupt"),
    ],
}

DASHBOARDS = {
    "overview": ("winnow / Overview", "Does it serve, how much, how fast, and is there room?", OVERVIEW),
    "reads": ("winnow / Reads", "What attention reads from which tier, and how good the choice is.", READS),
}
