from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_UNSPECIFIED: FinishReason

class CacheOptions(_message.Message):
    __slots__ = ["priority", "salt", "store", "ttl_seconds", "use"]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    priority: int
    salt: str
    store: bool
    ttl_seconds: int
    use: bool
    def __init__(self, use: bool = ..., store: bool = ..., priority: _Optional[int] = ..., ttl_seconds: _Optional[int] = ..., salt: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ["content", "name", "reasoning", "role", "tool_call_id", "tool_calls"]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    content: str
    name: str
    reasoning: str
    role: str
    tool_call_id: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ["add_generation_prompt", "messages", "template_options", "tools"]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    add_generation_prompt: bool
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_options: str
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ..., tools: _Optional[_Iterable[str]] = ..., template_options: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ["texts"]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ["ids", "show_special_tokens"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    show_special_tokens: bool
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., show_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ["text"]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class DraftUsage(_message.Message):
    __slots__ = ["accepted_at", "accepted_tokens", "draft_read_bytes", "drafted_tokens", "verifications", "verified_at", "verified_tokens", "verify_read_bytes"]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AT_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    accepted_tokens: int
    draft_read_bytes: KvReadBytes
    drafted_tokens: int
    verifications: int
    verified_at: _containers.RepeatedScalarFieldContainer[int]
    verified_tokens: int
    verify_read_bytes: KvReadBytes
    def __init__(self, drafted_tokens: _Optional[int] = ..., verified_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., verifications: _Optional[int] = ..., verified_at: _Optional[_Iterable[int]] = ..., accepted_at: _Optional[_Iterable[int]] = ..., draft_read_bytes: _Optional[_Union[KvReadBytes, _Mapping]] = ..., verify_read_bytes: _Optional[_Union[KvReadBytes, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ["reason", "stop_string", "stop_token_id", "usage"]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ["cache", "chat", "exactness", "n", "policy", "prompt_logprobs", "sampling", "show_special_tokens", "stopping", "structured_output", "text", "tokens", "top_logprobs"]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    cache: CacheOptions
    chat: ChatPrompt
    exactness: str
    n: int
    policy: str
    prompt_logprobs: int
    sampling: SamplingOptions
    show_special_tokens: bool
    stopping: StoppingOptions
    structured_output: StructuredOutput
    text: TextPrompt
    tokens: TokenPrompt
    top_logprobs: int
    def __init__(self, text: _Optional[_Union[TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stopping: _Optional[_Union[StoppingOptions, _Mapping]] = ..., n: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., policy: _Optional[str] = ..., show_special_tokens: bool = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., exactness: _Optional[str] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ["choice", "finish", "prompt_tokens", "text", "tokens"]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish: Finish
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[PromptToken]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_tokens: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ["architecture", "chat_template", "default_exactness", "default_max_tokens", "default_policy", "default_sampling", "dtype", "eos_token_ids", "kv_dtype", "max_context", "max_prompt_bytes", "name", "policies", "retrieval", "structured_output", "version", "vocab_size"]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    chat_template: str
    default_exactness: str
    default_max_tokens: int
    default_policy: str
    default_sampling: SamplingOptions
    dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_dtype: str
    max_context: int
    max_prompt_bytes: int
    name: str
    policies: _containers.RepeatedScalarFieldContainer[str]
    retrieval: RetrievalInfo
    structured_output: bool
    version: str
    vocab_size: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., chat_template: _Optional[str] = ..., policies: _Optional[_Iterable[str]] = ..., default_policy: _Optional[str] = ..., default_sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., default_max_tokens: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., version: _Optional[str] = ..., retrieval: _Optional[_Union[RetrievalInfo, _Mapping]] = ..., structured_output: bool = ..., default_exactness: _Optional[str] = ...) -> None: ...

class KvReadBytes(_message.Message):
    __slots__ = ["disk", "fast", "host"]
    DISK_FIELD_NUMBER: _ClassVar[int]
    FAST_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    disk: int
    fast: int
    host: int
    def __init__(self, fast: _Optional[int] = ..., host: _Optional[int] = ..., disk: _Optional[int] = ...) -> None: ...

class PromptToken(_message.Message):
    __slots__ = ["id", "logprob", "rank", "top"]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class RetrievalIndex(_message.Message):
    __slots__ = ["bits", "learned", "name", "pool_bytes"]
    BITS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    bits: int
    learned: bool
    name: str
    pool_bytes: int
    def __init__(self, name: _Optional[str] = ..., bits: _Optional[int] = ..., learned: bool = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class RetrievalInfo(_message.Message):
    __slots__ = ["artifact", "completion", "exact", "indexes", "probe_interval", "retrieve_from", "retrieve_from_measured"]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    PROBE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FROM_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FROM_MEASURED_FIELD_NUMBER: _ClassVar[int]
    artifact: str
    completion: bool
    exact: bool
    indexes: _containers.RepeatedCompositeFieldContainer[RetrievalIndex]
    probe_interval: int
    retrieve_from: int
    retrieve_from_measured: bool
    def __init__(self, indexes: _Optional[_Iterable[_Union[RetrievalIndex, _Mapping]]] = ..., completion: bool = ..., artifact: _Optional[str] = ..., retrieve_from: _Optional[int] = ..., retrieve_from_measured: bool = ..., probe_interval: _Optional[int] = ..., exact: bool = ...) -> None: ...

class RetrievalUsage(_message.Message):
    __slots__ = ["candidate_rows", "coverage", "floor_dense_tokens", "iou", "kept", "probes", "selected_rows", "tail_estimates", "tail_mass", "widened_tokens"]
    CANDIDATE_ROWS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    FLOOR_DENSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IOU_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    SELECTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TAIL_ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    TAIL_MASS_FIELD_NUMBER: _ClassVar[int]
    WIDENED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    candidate_rows: int
    coverage: float
    floor_dense_tokens: int
    iou: float
    kept: float
    probes: int
    selected_rows: int
    tail_estimates: int
    tail_mass: float
    widened_tokens: int
    def __init__(self, candidate_rows: _Optional[int] = ..., selected_rows: _Optional[int] = ..., kept: _Optional[float] = ..., probes: _Optional[int] = ..., coverage: _Optional[float] = ..., iou: _Optional[float] = ..., tail_estimates: _Optional[int] = ..., tail_mass: _Optional[float] = ..., widened_tokens: _Optional[int] = ..., floor_dense_tokens: _Optional[int] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ["frequency_penalty", "logit_bias", "min_p", "presence_penalty", "repetition_penalty", "seed", "temperature", "top_k", "top_p"]
    class LogitBiasEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_p: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    temperature: float
    top_k: int
    top_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class StoppingOptions(_message.Message):
    __slots__ = ["ignore_eos", "include_stop", "max_tokens", "min_tokens", "stop_strings", "stop_token_ids"]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ignore_eos: bool
    include_stop: bool
    max_tokens: int
    min_tokens: int
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_strings: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., include_stop: bool = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ["choice", "grammar", "json_object", "json_schema", "open", "regex", "structural_tag"]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    choice: Choices
    grammar: str
    json_object: bool
    json_schema: str
    open: bool
    regex: str
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., open: bool = ...) -> None: ...

class TextPrompt(_message.Message):
    __slots__ = ["add_special_tokens", "text"]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    add_special_tokens: bool
    text: str
    def __init__(self, text: _Optional[str] = ..., add_special_tokens: bool = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ["id", "logprob", "top"]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ["id", "logprob", "text"]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    text: str
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ["ids"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ["chat", "text"]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    chat: ChatPrompt
    text: TextPrompt
    def __init__(self, text: _Optional[_Union[TextPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ["ids"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ["arguments", "id", "name"]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    arguments: str
    id: str
    name: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ["attended_rows", "cached_tokens", "dense_rows", "drafts", "exactness", "generated_tokens", "kv_dense_bytes", "kv_read_bytes", "policy", "preemptions", "prompt_tokens", "queue_seconds", "retrieval", "time_to_first_token_seconds", "total_seconds"]
    ATTENDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DENSE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_DENSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    attended_rows: int
    cached_tokens: int
    dense_rows: int
    drafts: DraftUsage
    exactness: str
    generated_tokens: int
    kv_dense_bytes: int
    kv_read_bytes: KvReadBytes
    policy: str
    preemptions: int
    prompt_tokens: int
    queue_seconds: float
    retrieval: RetrievalUsage
    time_to_first_token_seconds: float
    total_seconds: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_read_bytes: _Optional[_Union[KvReadBytes, _Mapping]] = ..., kv_dense_bytes: _Optional[int] = ..., attended_rows: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., time_to_first_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., dense_rows: _Optional[int] = ..., retrieval: _Optional[_Union[RetrievalUsage, _Mapping]] = ..., drafts: _Optional[_Union[DraftUsage, _Mapping]] = ..., policy: _Optional[str] = ..., exactness: _Optional[str] = ...) -> None: ...

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
